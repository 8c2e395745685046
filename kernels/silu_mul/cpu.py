"""silu(gate) * up in one pass."""

from __future__ import annotations

from typing import Any

from numba import prange
from torch import Tensor

from kernels.jit import parallel_kernel, sigmoid32


@parallel_kernel
def _silu_mul(gate_up: Any, out: Any) -> None:
    rows, width = out.shape
    for r in prange(rows):
        for i in range(width):
            gate = gate_up[r, i]
            out[r, i] = gate * sigmoid32(gate) * gate_up[r, width + i]


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [R, 2 I] float32, gate first -> silu(gate) * up [R, I]."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _silu_mul(gate_up.numpy(), out.numpy())
    return out
