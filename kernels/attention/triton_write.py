"""First launch of the attention mixer: q and k are normed and turned, k and v go to their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.triton_queries import INDEX_POINTERS, Queries
from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch

# Heads in one program, of one row or of several; the same in every step, so that the norm of a
# head is added up in the same order in every step.
AT_ONCE = 16


@triton.jit
def _norm_rope(
    p_x: tl.tensor,
    m_x: tl.tensor,
    b_position: tl.tensor,
    p_scale: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """RMSNorm of the heads at p_x [AT_ONCE], then RoPE of their first 2 HALF numbers, in float32.

    m_x says which heads are there, b_position [AT_ONCE] where their rows stand.
    """
    o_x = tl.arange(0, WIDTH)
    # The other number of each pair is loaded again (from L1): a block cannot be permuted.
    o_other = tl.where(o_x < HALF, o_x + HALF, tl.where(o_x < 2 * HALF, o_x - HALF, o_x))
    b_x = tl.load(p_x[:, None] + o_x[None, :], mask=m_x[:, None], other=0.0).to(tl.float32)
    b_other = tl.load(p_x[:, None] + o_other[None, :], mask=m_x[:, None], other=0.0)
    b_inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 1) / WIDTH + eps)
    b_x = b_x * (b_inverse[:, None] * tl.load(p_scale + o_x)[None, :])
    b_other = b_other.to(tl.float32) * (b_inverse[:, None] * tl.load(p_scale + o_other)[None, :])
    o_angle = b_position[:, None] * HALF + tl.where(o_x < HALF, o_x, o_x - HALF)[None, :]
    m_angle = m_x[:, None] & (o_x < 2 * HALF)[None, :]
    b_cos = tl.load(p_cos + o_angle, mask=m_angle, other=1.0)
    b_sin = tl.load(p_sin + o_angle, mask=m_angle, other=0.0)
    return b_x * b_cos + tl.where(o_x < HALF, -1.0, 1.0)[None, :] * b_other * b_sin


@triton.jit(
    do_not_specialize=["keys", "queries", "table_width"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _write(
    p_qkv: tl.tensor,
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_q_norm: tl.tensor,
    p_k_norm: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_rows: tl.tensor,
    p_owners: tl.tensor,
    p_positions: tl.tensor,
    p_tables: tl.tensor,
    qkv_stride: tl.tensor,
    keys: tl.tensor,
    queries: tl.tensor,
    table_width: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
) -> None:
    # The first programs take `keys` heads of k and v, the others `queries` heads of q.
    program = tl.program_id(0)
    key_programs = tl.cdiv(keys, AT_ONCE)
    o_x = tl.arange(0, WIDTH)
    if program < key_programs:
        o_key = program.to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
        m_key = o_key < keys
        o_row = o_key // KV_HEADS
        o_head = o_key % KV_HEADS
        b_position = tl.load(p_positions + o_row, mask=m_key, other=0)
        b_owner = tl.load(p_owners + o_row, mask=m_key, other=0)
        p_block = p_tables + b_owner * table_width + b_position // PAGE
        b_block = tl.load(p_block, mask=m_key, other=0)
        p_source = p_qkv + o_row * qkv_stride + (2 * HEADS + o_head) * WIDTH
        b_k = _norm_rope(p_source, m_key, b_position, p_k_norm, p_cos, p_sin, eps, WIDTH, HALF)
        p_own_v = (p_source + KV_HEADS * WIDTH)[:, None] + o_x[None, :]
        b_v = tl.load(p_own_v, mask=m_key[:, None], other=0.0).to(tl.float32)
        o_page = (b_block * KV_HEADS + o_head) * (WIDTH * PAGE)
        b_place = b_position % PAGE
        p_key = p_k + (o_page + b_place)[:, None] + o_x[None, :] * PAGE
        tl.store(p_key, b_k.to(p_k.dtype.element_ty), mask=m_key[:, None])
        p_value = p_v + (o_page + b_place * WIDTH)[:, None] + o_x[None, :]
        tl.store(p_value, b_v.to(p_v.dtype.element_ty), mask=m_key[:, None])
    else:
        o_query = (program - key_programs).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
        m_query = o_query < queries
        o_row = o_query // HEADS
        if HAS_ROWS:
            o_row = tl.load(p_rows + o_row, mask=m_query, other=0)
        b_position = tl.load(p_positions + o_row, mask=m_query, other=0)
        p_source = p_qkv + o_row * qkv_stride + (o_query % HEADS) * WIDTH
        b_q = _norm_rope(p_source, m_query, b_position, p_q_norm, p_cos, p_sin, eps, WIDTH, HALF)
        p_query = p_q + (o_query * WIDTH)[:, None] + o_x[None, :]
        tl.store(p_query, b_q.to(p_q.dtype.element_ty), mask=m_query[:, None])


def write_rows(
    qkv: Tensor, params: AttentionParams, pages: KvPages, batch: RaggedBatch, asked: Queries
) -> Tensor:
    """Keys and values of every row of qkv into their pages; q [n, nH, hd] of the asked rows."""
    q = qkv.new_empty(asked.count, params.heads, params.head_dim)
    keys, queries = qkv.shape[0] * params.kv_heads, asked.count * params.heads
    _write[(triton.cdiv(keys, AT_ONCE) + triton.cdiv(queries, AT_ONCE),)](
        qkv,
        q,
        pages.k,
        pages.v,
        params.q_norm,
        params.k_norm,
        params.cos,
        params.sin,
        batch.positions if asked.rows is None else asked.rows,
        batch.row_segment,
        batch.positions,
        batch.block_tables,
        qkv.stride(0),
        keys,
        queries,
        batch.block_tables.stride(0),
        params.eps,
        HEADS=params.heads,
        KV_HEADS=params.kv_heads,
        WIDTH=params.head_dim,
        HALF=params.cos.shape[1],
        PAGE=pages.v.shape[2],
        AT_ONCE=AT_ONCE,
        HAS_ROWS=asked.rows is not None,
        num_warps=4,
    )
    return q
