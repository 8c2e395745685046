"""One program a row: the row is read once, added to, normed in float32 and written.

The order of a row's sum depends on the width alone, so its bits do not depend on the other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_guard import guard

# A row is one block in registers: 32768 numbers are 64 for each thread of 16 warps.
LARGEST = 32768


@triton.jit
def _norm(b_x: tl.tensor, b_scale: tl.tensor, width: tl.tensor, eps: tl.tensor) -> tl.tensor:
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / width + eps) * b_scale


@triton.jit
def _add_rms_norm(
    p_residual: tl.tensor,
    p_delta: tl.tensor,
    p_scale: tl.tensor,
    p_out: tl.tensor,
    residual_stride: tl.tensor,
    delta_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)
    m_column = o_column < width
    p_row = p_residual + row * residual_stride + o_column
    b_x = tl.load(p_row, mask=m_column, other=0.0).to(tl.float32)
    if HAS_DELTA:
        p_other = p_delta + row * delta_stride + o_column
        b_sum = b_x + tl.load(p_other, mask=m_column, other=0.0).to(tl.float32)
        b_stored = b_sum.to(p_residual.dtype.element_ty)
        tl.store(p_row, b_stored, mask=m_column)
        # The norm is of the residual as it is stored, not of the unrounded sum.
        b_x = b_stored.to(tl.float32)
    b_scale = tl.load(p_scale + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_out = _norm(b_x, b_scale, width, eps)
    tl.store(p_out + row * width + o_column, b_out.to(p_out.dtype.element_ty), mask=m_column)


@triton.jit
def _join_norms(
    p_left: tl.tensor,
    p_left_scale: tl.tensor,
    p_right: tl.tensor,
    p_right_scale: tl.tensor,
    p_out: tl.tensor,
    left_stride: tl.tensor,
    right_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)
    m_column = o_column < width
    p_row = p_out + 2 * row * width + o_column
    if tl.program_id(1) == 0:
        b_left = tl.load(p_left + row * left_stride + o_column, mask=m_column, other=0.0)
        b_scale = tl.load(p_left_scale + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_out = _norm(b_left.to(tl.float32), b_scale, width, eps)
        tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_column)
    else:
        b_right = tl.load(p_right + row * right_stride + o_column, mask=m_column, other=0.0)
        b_scale = tl.load(p_right_scale + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_out = _norm(b_right.to(tl.float32), b_scale, width, eps)
        tl.store(p_row + width, b_out.to(p_out.dtype.element_ty), mask=m_column)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """As naive.rms_norm: x [..., H] -> same shape and dtype.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, width or device.
    """
    rows = x.reshape(-1, x.shape[-1])
    return add_rms_norm(rows, None, scale, eps).view(x.shape)


def add_rms_norm(residual: Tensor, delta: Tensor | None, scale: Tensor, eps: float) -> Tensor:
    """residual [R, H] += delta in place (when there is one), then its norm [R, H].

    Raises:
        UnsupportedKernelError: no kernel for this dtype, width or device.
    """
    rows, width = residual.shape
    guard("add_rms_norm", residual, width, LARGEST, "width H")
    other = residual if delta is None else delta
    assert other.shape == residual.shape
    assert residual.stride(1) == other.stride(1) == scale.stride(0) == 1
    out = residual.new_empty(rows, width)
    if rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm[(rows,)](
            residual,
            other,
            scale,
            out,
            residual.stride(0),
            other.stride(0),
            width,
            eps,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out


def join_norms(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, eps: float
) -> Tensor:
    """left, right [R, H] -> [R, 2 H]: each normed with its own scale, side by side.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, width or device.
    """
    rows, width = left.shape
    guard("join_norms", left, width, LARGEST, "width H")
    guard("join_norms", right, width, LARGEST, "width H")
    assert left.shape == right.shape
    assert left.stride(1) == right.stride(1) == left_scale.stride(0) == right_scale.stride(0) == 1
    out = left.new_empty(rows, 2 * width)
    if rows:
        block = triton.next_power_of_2(width)
        _join_norms[(rows, 2)](
            left,
            left_scale,
            right,
            right_scale,
            out,
            left.stride(0),
            right.stride(0),
            width,
            eps,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out


def _warps(block: int) -> int:
    """Up to 16 numbers a thread, then more warps, at most 16."""
    return max(1, min(16, block // 512))
