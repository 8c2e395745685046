"""The naive loop over experts, with a gate whose bits do not depend on the batch.

torch.sigmoid treats the tail of a tensor differently from its body, so that a row's gate changed
with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import prange
from torch import Tensor

from kernels.jit import parallel_kernel, sigmoid32
from kernels.moe.naive import MoeParams, add_experts


@parallel_kernel
def _scale_rows(rows: Any, gates: Any) -> None:
    count, width = rows.shape
    for r in prange(count):
        scale = sigmoid32(gates[r, 0])
        for i in range(width):
            rows[r, i] *= scale


def moe_mlp(x: Tensor, params: MoeParams, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
    """As naive.moe_mlp, float32."""
    out = params.shared.down(silu_mul(params.shared.gate_up(x)))
    _scale_rows(out.numpy(), params.shared_gate(x).numpy())
    add_experts(out, x, params, silu_mul)
    return out
