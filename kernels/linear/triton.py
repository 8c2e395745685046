"""A matrix product of fixed tiles, whose rows are the same bits at every number of rows.

cuBLAS picks another kernel, and so another order of summation, for other numbers of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_guard import dot_dtype, guard

# One tile of rows for 1 row and for 128: another tile would be another instruction. 64 rows of a
# tensor core tile cost less time than reading the weights once does.
BLOCK_M = 64
LARGEST = 1 << 24


@triton.jit(do_not_specialize=["rows"])
def _linear(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_out: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    # Tiles of rows are the fast axis: those that share a tile of weights run side by side.
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m, m_n = o_m < rows, o_n < N
    p_left = p_x + o_m[:, None] * x_stride + o_k[None, :]
    p_right = p_weight + o_n[None, :] * K + o_k[:, None]
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        m_k = o_k < K - k
        b_x = tl.load(p_left + k, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_w = tl.load(p_right + k, mask=m_n[None, :] & m_k[:, None], other=0.0)
        b_sum = tl.dot(b_x.to(DOT), b_w.to(DOT), b_sum, input_precision="ieee")
    p_sum = p_out + o_m[:, None] * N + o_n[None, :]
    tl.store(p_sum, b_sum.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """weight [N, K] in the activation dtype, row after row."""

    weight: Tensor
    form: str = "triton"

    @property
    def nbytes(self) -> int:
        """Bytes that the weight occupies."""
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N].

        Raises:
            UnsupportedKernelError: no kernel for this dtype, K or device.
        """
        return linear(x, self.weight)


def pack(weight: Tensor, dtype: torch.dtype) -> TritonLinear:
    """Hold weight [N, K] in the activation dtype.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, K or device.
    """
    held = weight.to(dtype).contiguous()
    guard("linear", held, held.shape[1], LARGEST, "inputs K")
    return TritonLinear(held)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K], weight [N, K] of one dtype -> x @ weight^T [M, N], summed in float32."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    guard("linear", x, inputs, LARGEST, "inputs K")
    assert x.dtype == weight.dtype
    assert x.shape[1] == inputs
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = x.new_empty(rows, outputs)
    if rows:
        block_n, block_k, stages = _tile(outputs, x.dtype)
        grid = (triton.cdiv(rows, BLOCK_M), triton.cdiv(outputs, block_n))
        _linear[grid](
            x,
            weight,
            out,
            x.stride(0),
            rows,
            outputs,
            inputs,
            BLOCK_M=BLOCK_M,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            DOT=dot_dtype(x.dtype),
            num_warps=4,
            num_stages=stages,
        )
    return out


def _tile(outputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(columns, inputs of one round, rounds in flight), by the weight alone.

    The widest tile that still makes a program for every multiprocessor of a large card; the
    narrowest takes longer rounds, so that as many bytes are on their way.
    """
    wide = dtype == torch.float32
    columns = 64 if wide else 128
    while columns > 32 and triton.cdiv(outputs, columns) < 128:
        columns //= 2
    if wide:
        return columns, 32, 3
    return columns, *((128, 4) if columns == 32 else (64, 3))
