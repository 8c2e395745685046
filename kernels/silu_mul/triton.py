"""silu(gate) * up in one pass, in float32, rounded once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_guard import guard

BLOCK = 1024
LARGEST = 1 << 24


@triton.jit
def _silu_mul(
    p_gate_up: tl.tensor, p_out: tl.tensor, stride: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < width
    p_gate = p_gate_up + row * stride + o_column
    b_gate = tl.load(p_gate, mask=m_column, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + width, mask=m_column, other=0.0).to(tl.float32)
    # exp of what is never positive: no overflow however large the gate.
    b_exp = tl.exp(-tl.abs(b_gate))
    b_out = b_gate * tl.where(b_gate >= 0, 1.0, b_exp) / (1.0 + b_exp) * b_up
    tl.store(p_out + row * width + o_column, b_out.to(p_out.dtype.element_ty), mask=m_column)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [R, 2 I], gate first -> silu(gate) * up [R, I].

    Raises:
        UnsupportedKernelError: no kernel for this dtype, width or device.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    guard("silu_mul", gate_up, width, LARGEST, "width I")
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(rows, width)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _silu_mul[grid](gate_up, out, gate_up.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return out
