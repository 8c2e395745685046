"""Attention of prefill chunks over the cached context and themselves, gated, in one launch.

Tiles of keys lie on absolute positions and come in order, so that a prompt row has the same bits
however the prompt is cut into chunks; they are not the bits of a decode row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.triton_queries import INDEX_POINTERS, Queries, shape_of
from kernels.attention.triton_tiles import attend, query_tile, sigmoid
from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _attend_chunks(
    p_qkv: tl.tensor,
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_out: tl.tensor,
    p_rows: tl.tensor,
    p_positions: tl.tensor,
    p_start: tl.tensor,
    p_first_key: tl.tensor,
    p_chunked: tl.tensor,
    p_tables: tl.tensor,
    qkv_stride: tl.tensor,
    table_width: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    LINES: tl.constexpr,
    DOT: tl.constexpr,
    HAS_ROWS: tl.constexpr,
) -> None:
    # The last rows of a chunk see most: they start first, so that none of them is left over.
    line = (tl.num_programs(0) - 1 - tl.program_id(0)) * LINES
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    segment = tl.program_id(2).to(tl.int64)
    first = tl.load(p_start + segment)
    end = tl.load(p_start + segment + 1)
    if (tl.load(p_chunked + segment) == 0) | (first + line // GROUP >= end):
        return
    b_q, b_position, o_place, m_line = query_tile(
        p_q, p_positions, first, end, head, kv_heads, line, GROUP, WIDTH, LINES
    )
    oldest = tl.load(p_first_key + segment).to(tl.int32)
    b_mixed, _, b_sum = attend(
        b_q,
        b_position,
        oldest,
        oldest // KEYS,
        tl.max(b_position, 0) // KEYS + 1,
        p_k + head * (WIDTH * PAGE),
        p_v + head * (WIDTH * PAGE),
        p_tables + segment * table_width,
        kv_heads.to(tl.int64) * (WIDTH * PAGE),
        scale,
        WIDTH,
        PAGE,
        KEYS,
        LINES,
        DOT,
    )
    heads = kv_heads * GROUP
    o_width = tl.arange(0, WIDTH)
    o_row = o_place // heads
    o_head = o_place % heads
    if HAS_ROWS:
        o_row = tl.load(p_rows + o_row, mask=m_line, other=0)
    p_gate = p_qkv + (o_row * qkv_stride + (heads + o_head) * WIDTH)[:, None] + o_width[None, :]
    b_gate = tl.load(p_gate, mask=m_line[:, None], other=0.0).to(tl.float32)
    # Lines that are not there saw nothing; their sum is 0.
    b_out = b_mixed / tl.where(m_line, b_sum, 1.0)[:, None] * sigmoid(b_gate)
    p_lines = p_out + o_place[:, None] * WIDTH + o_width[None, :]
    tl.store(p_lines, b_out.to(p_out.dtype.element_ty), mask=m_line[:, None])


def attend_chunked(
    qkv: Tensor,
    q: Tensor,
    params: AttentionParams,
    pages: KvPages,
    batch: RaggedBatch,
    asked: Queries,
    out: Tensor,
) -> None:
    """Fill the rows of out [n, nH hd] whose sequences are chunked; q [n, nH, hd]."""
    shape = shape_of(params, pages.v.shape[2], qkv.dtype, prefill=True)
    tiles = triton.cdiv(asked.longest * shape.group, shape.lines)
    _attend_chunks[(tiles, params.kv_heads, batch.starts.shape[0])](
        qkv,
        q,
        pages.k,
        pages.v,
        out,
        asked.positions if asked.rows is None else asked.rows,
        asked.positions,
        asked.start,
        batch.first_key,
        batch.chunked,
        batch.block_tables,
        qkv.stride(0),
        batch.block_tables.stride(0),
        shape.scale,
        GROUP=shape.group,
        WIDTH=params.head_dim,
        PAGE=shape.page,
        KEYS=shape.keys,
        LINES=shape.lines,
        DOT=shape.dot,
        HAS_ROWS=asked.rows is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
