"""The products of many experts in one launch each, and the sum of a row's outputs.

Knows tiles of rows and stacked weights, not how rows were routed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.naive import StackedExperts
from kernels.moe.triton_route import BLOCK_M, Tiles
from kernels.triton_guard import dot_dtype

# Columns of a tile: two products run side by side for gate and up.
BLOCK_GATE = 32
BLOCK_DOWN = 64
BLOCK_SUM = 1024


@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_out: tl.tensor,
    p_pairs: tl.tensor,
    p_experts: tl.tensor,
    x_stride: tl.tensor,
    pairs: tl.tensor,
    inner: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(p_experts + tile).to(tl.int64)
    if expert < 0:
        return
    o_pair = tl.load(p_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m_pair = o_pair < pairs
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < inner
    o_k = tl.arange(0, BLOCK_K)
    p_row = p_x + (o_pair // TOP_K)[:, None] * x_stride + o_k[None, :]
    o_weight = o_n[None, :].to(tl.int64) * width + o_k[:, None]
    p_gate = p_weight + 2 * expert * inner * width + o_weight
    p_up = p_weight + (2 * expert + 1) * inner * width + o_weight
    b_gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    b_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, width, BLOCK_K):
        m_k = o_k < width - k
        m_weight = m_n[None, :] & m_k[:, None]
        b_x = tl.load(p_row + k, mask=m_pair[:, None] & m_k[None, :], other=0.0).to(DOT)
        b_w = tl.load(p_gate + k, mask=m_weight, other=0.0).to(DOT)
        b_gate = tl.dot(b_x, b_w, b_gate, input_precision="ieee")
        b_w = tl.load(p_up + k, mask=m_weight, other=0.0).to(DOT)
        b_up = tl.dot(b_x, b_w, b_up, input_precision="ieee")
    # silu(gate) * up, with exp of what is never positive.
    b_exp = tl.exp(-tl.abs(b_gate))
    b_out = b_gate * tl.where(b_gate >= 0, 1.0, b_exp) / (1.0 + b_exp) * b_up
    p_act = p_out + o_pair[:, None] * inner + o_n[None, :]
    tl.store(p_act, b_out.to(p_out.dtype.element_ty), mask=m_pair[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down(
    p_act: tl.tensor,
    p_weight: tl.tensor,
    p_share: tl.tensor,
    p_out: tl.tensor,
    p_pairs: tl.tensor,
    p_experts: tl.tensor,
    pairs: tl.tensor,
    inner: tl.tensor,
    width: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(p_experts + tile).to(tl.int64)
    if expert < 0:
        return
    o_pair = tl.load(p_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m_pair = o_pair < pairs
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < width
    o_k = tl.arange(0, BLOCK_K)
    p_row = p_act + o_pair[:, None] * inner + o_k[None, :]
    p_column = p_weight + expert * width * inner + o_n[None, :].to(tl.int64) * inner + o_k[:, None]
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inner, BLOCK_K):
        m_k = o_k < inner - k
        b_act = tl.load(p_row + k, mask=m_pair[:, None] & m_k[None, :], other=0.0).to(DOT)
        b_w = tl.load(p_column + k, mask=m_n[None, :] & m_k[:, None], other=0.0).to(DOT)
        b_sum = tl.dot(b_act, b_w, b_sum, input_precision="ieee")
    b_share = tl.load(p_share + o_pair, mask=m_pair, other=0.0)
    p_part = p_out + o_pair[:, None] * width + o_n[None, :]
    b_part = (b_sum * b_share[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_part, b_part, mask=m_pair[:, None] & m_n[None, :])


@triton.jit
def _add_up(
    p_shared: tl.tensor,
    p_gate: tl.tensor,
    p_parts: tl.tensor,
    p_out: tl.tensor,
    gate_stride: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < width
    gate = tl.load(p_gate + row * gate_stride).to(tl.float32)
    exp = tl.exp(-tl.abs(gate))
    scale = tl.where(gate >= 0, 1.0, exp) / (1.0 + exp)
    b_sum = tl.load(p_shared + row * width + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_sum = b_sum * scale
    for rank in range(TOP_K):
        p_part = p_parts + (row * TOP_K + rank) * width + o_column
        b_sum += tl.load(p_part, mask=m_column, other=0.0).to(tl.float32)
    tl.store(p_out + row * width + o_column, b_sum.to(p_out.dtype.element_ty), mask=m_column)


def run_experts(x: Tensor, weights: Tensor, tiles: Tiles, experts: StackedExperts) -> Tensor:
    """Weighted outputs [R k, H] of every pair, x [R, H] rows and weights [R, k] of each expert."""
    top_k = weights.shape[1]
    pairs, count = weights.numel(), tiles.experts.numel()
    inner, width = experts.down.shape[2], x.shape[1]
    act = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    block_k = 32 if x.dtype == torch.float32 else 128
    _gate_up[count, triton.cdiv(inner, BLOCK_GATE)](
        x,
        experts.gate_up,
        act,
        tiles.pairs,
        tiles.experts,
        x.stride(0),
        pairs,
        inner,
        width,
        TOP_K=top_k,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_GATE,
        BLOCK_K=block_k,
        DOT=dot_dtype(x.dtype),
        num_warps=4,
        num_stages=3,
    )
    _down[count, triton.cdiv(width, BLOCK_DOWN)](
        act,
        experts.down,
        weights,
        parts,
        tiles.pairs,
        tiles.experts,
        pairs,
        inner,
        width,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_DOWN,
        BLOCK_K=block_k,
        DOT=dot_dtype(x.dtype),
        num_warps=4,
        num_stages=3,
    )
    return parts


def add_up(shared: Tensor, gate: Tensor, parts: Tensor, top_k: int) -> Tensor:
    """shared [R, H] * sigmoid(gate [R, 1]) plus parts [R k, H] of each row, in their order."""
    rows, width = shared.shape
    assert shared.is_contiguous()
    out = torch.empty_like(shared)
    _add_up[rows, triton.cdiv(width, BLOCK_SUM)](
        shared, gate, parts, out, gate.stride(0), width, TOP_K=top_k, BLOCK=BLOCK_SUM, num_warps=4
    )
    return out
