"""silu(gate) * up in one pass."""

from __future__ import annotations

from typing import Any

from numba import prange
from torch import Tensor

from kernels.curves import silu_of
from kernels.jit import parallel_kernel, sigmoid32
from kernels.lanes import WIDE, load32, store, times


@parallel_kernel
def _silu_mul(gate_up: Any, out: Any) -> None:
    rows, width = out.shape
    whole = width // WIDE * WIDE
    for r in prange(rows):
        gate_at, out_at = 2 * r * width, r * width
        for i in range(0, whole, WIDE):
            up = load32(gate_up, gate_at + width + i)
            store(out, out_at + i, times(silu_of(load32(gate_up, gate_at + i)), up))
        for i in range(whole, width):
            gate = gate_up[r, i]
            out[r, i] = gate * sigmoid32(gate) * gate_up[r, width + i]


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [R, 2 I] float32, gate first -> silu(gate) * up [R, I]."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _silu_mul(gate_up.numpy(), out.numpy())
    return out
