"""Attention of decode, verify and replay rows: KV in splits that never move, then their sum.

A split is the same keys at any batch, and splits are added in the order of their positions: a row
has the same bits alone, in a batch, padded, and as one of several verify rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.triton_queries import (
    INDEX_POINTERS,
    Queries,
    recurrent_before,
    shape_of,
)
from kernels.attention.triton_tiles import attend, query_tile, sigmoid
from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch

# Most that the partial results of one launch may take; more rows than fit go through in turns.
SCRATCH_BYTES = 128 << 20
# Splits of one size at the start of a sequence, and in every octave of positions behind them.
EQUAL, PER_OCTAVE = 16, 8
# More than any sequence has: 16 + 8 log2(262144 / 4096) = 64 at the longest context of 27B.
MOST_SPLITS = 128


def split_size(kv_heads: int) -> int:
    """Keys in one of the first 16 splits, a property of the model alone.

    16 sequences of 1024 keys make 256 programs on 0.8B (2 KV heads) and on 27B (4), about one wave
    of the two that fit on each of 132 SMs. The partial results of a group of 6 are 5 % of the
    bytes of 256 keys, those of a group of 4 are 6 % of the bytes of 128.
    """
    return 128 if kv_heads <= 2 else 256


def split_count(keys: int, size: int) -> int:
    """Splits of `keys` keys; the first 16 have `size`, then the size doubles every 8.

    Room and programs are needed for the longest sequence there may be. With one size they would be
    16 times as many at 262144 tokens as at 16384, for whatever is really there; so they grow with
    the logarithm, and a long sequence still has enough of them to fill a card.
    """
    count, edge, length = min(EQUAL, -(-keys // size)), EQUAL * size, 2 * size
    while edge < keys:
        count += min(PER_OCTAVE, -(-(keys - edge) // length))
        edge, length = 2 * edge, 2 * length
    return count


@triton.jit
def first_key_of(
    split: tl.tensor, SIZE: tl.constexpr, EQUAL: tl.constexpr, PER_OCTAVE: tl.constexpr
) -> tl.tensor:
    """Where a split begins; see split_count. An octave behind the equal ones starts at its size."""
    behind = tl.maximum(split - EQUAL, 0)
    edge = (behind * 0 + EQUAL * SIZE) << (behind // PER_OCTAVE)
    far = edge + behind % PER_OCTAVE * (edge // PER_OCTAVE)
    return tl.where(split < EQUAL, split * SIZE, far)


@triton.jit(
    do_not_specialize=["table_width", "window", "window_rows", "mixed"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _attend_splits(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_partials: tl.tensor,
    p_stats: tl.tensor,
    p_places: tl.tensor,
    p_positions: tl.tensor,
    p_start: tl.tensor,
    p_first_key: tl.tensor,
    p_chunked: tl.tensor,
    p_tables: tl.tensor,
    table_width: tl.tensor,
    window: tl.tensor,
    window_rows: tl.tensor,
    mixed: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    EQUAL: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    KEYS: tl.constexpr,
    LINES: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    split = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(0)
    kv_heads = tl.num_programs(1)
    first = tl.load(p_start + segment)
    end = tl.load(p_start + segment + 1)
    # row + shift is the place of a query row in the scratch, which has no room for chunked ones.
    # `mixed` says whether there are any; at run time, so that one kernel makes the same bits for a
    # row beside prompts and without them.
    shift = (recurrent_before(p_start, p_chunked, segment * mixed) - first) * mixed - window
    end = tl.where(tl.load(p_chunked + segment) == 0, end, first)
    first = tl.maximum(first, -shift)
    end = tl.minimum(end, window_rows - shift)
    if first >= end:
        return
    oldest = tl.load(p_first_key + segment).to(tl.int32)
    newest = tl.load(p_positions + end - 1).to(tl.int32)
    split_start = first_key_of(split, SPLIT, EQUAL, PER_OCTAVE)
    split_end = first_key_of(split + 1, SPLIT, EQUAL, PER_OCTAVE)
    if (split_start > newest) | (split_end <= oldest):
        return
    first_tile = tl.maximum(split_start, oldest) // KEYS
    p_head_k = p_k + head * (WIDTH * PAGE)
    p_head_v = p_v + head * (WIDTH * PAGE)
    block_stride = kv_heads.to(tl.int64) * (WIDTH * PAGE)
    o_width = tl.arange(0, WIDTH)
    # Rows of one sequence share the tiles of keys; more than fit a tile of lines (a replay) read
    # the split again from L2.
    for line in range(0, ((end - first) * GROUP).to(tl.int32), LINES):
        b_q, b_position, o_place, m_line = query_tile(
            p_q, p_positions, first, end, head, kv_heads, line, GROUP, WIDTH, LINES
        )
        seen = tl.minimum(tl.max(b_position, 0) + 1, split_end)
        b_mixed, b_peak, b_sum = attend(
            b_q,
            b_position,
            oldest,
            first_tile,
            tl.cdiv(seen, KEYS),
            p_head_k,
            p_head_v,
            p_tables + segment * table_width,
            block_stride,
            scale,
            WIDTH,
            PAGE,
            KEYS,
            LINES,
            DOT,
        )
        o_partial = (o_place + shift * (kv_heads * GROUP)) * splits + split
        p_partial = p_partials + o_partial[:, None] * WIDTH + o_width[None, :]
        tl.store(p_partial, b_mixed, mask=m_line[:, None])
        tl.store(p_stats + o_partial * 2, b_peak, mask=m_line)
        tl.store(p_stats + o_partial * 2 + 1, b_sum, mask=m_line)
        if mixed != 0:
            o_query = o_place // (kv_heads * GROUP)
            tl.store(p_places + o_query + shift, o_query, mask=m_line)


@triton.jit(
    do_not_specialize=["splits", "window", "mixed"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _combine(
    p_qkv: tl.tensor,
    p_partials: tl.tensor,
    p_stats: tl.tensor,
    p_out: tl.tensor,
    p_places: tl.tensor,
    p_rows: tl.tensor,
    p_owners: tl.tensor,
    p_positions: tl.tensor,
    p_first_key: tl.tensor,
    qkv_stride: tl.tensor,
    splits: tl.tensor,
    window: tl.tensor,
    mixed: tl.tensor,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    EQUAL: tl.constexpr,
    PER_OCTAVE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query = place + window
    if mixed != 0:
        query = tl.load(p_places + place)
    if query < 0:
        return
    segment = tl.load(p_owners + query)
    b_start = first_key_of(tl.arange(0, MOST_SPLITS), SPLIT, EQUAL, PER_OCTAVE)
    first = tl.sum((b_start <= tl.load(p_first_key + segment)).to(tl.int32), 0) - 1
    last = tl.sum((b_start <= tl.load(p_positions + query)).to(tl.int32), 0) - 1
    o_width = tl.arange(0, WIDTH)
    o_partials = (place * heads + head) * splits
    peak = -1.0e30
    total = 0.0
    b_mixed = tl.zeros([WIDTH], tl.float32)
    for split in range(first, last + 1, AT_ONCE):
        o_split = split + tl.arange(0, AT_ONCE)
        m_split = o_split <= last
        o_split = o_partials + o_split
        b_peak = tl.load(p_stats + o_split * 2, mask=m_split, other=-1.0e30)
        b_sum = tl.load(p_stats + o_split * 2 + 1, mask=m_split, other=0.0)
        p_partial = p_partials + o_split[:, None] * WIDTH + o_width[None, :]
        b_partial = tl.load(p_partial, mask=m_split[:, None], other=0.0)
        new = tl.maximum(peak, tl.max(b_peak, 0))
        b_weight = tl.exp2(b_peak - new)
        rescale = tl.exp2(peak - new)
        total = total * rescale + tl.sum(b_weight * b_sum, 0)
        b_mixed = b_mixed * rescale + tl.sum(b_weight[:, None] * b_partial, 0)
        peak = new
    row = query
    if HAS_ROWS:
        row = tl.load(p_rows + query)
    p_gate = p_qkv + row * qkv_stride + (heads + head) * WIDTH
    b_out = b_mixed / total * sigmoid(tl.load(p_gate + o_width).to(tl.float32))
    p_head = p_out + (query * heads + head) * WIDTH
    tl.store(p_head + o_width, b_out.to(p_out.dtype.element_ty))


def attend_recurrent(
    qkv: Tensor,
    q: Tensor,
    params: AttentionParams,
    pages: KvPages,
    batch: RaggedBatch,
    asked: Queries,
    out: Tensor,
) -> None:
    """Fill the rows of out [n, nH hd] whose sequences are not chunked; q [n, nH, hd]."""
    rows, mixed = asked.count, batch.prefills
    if mixed and batch.recurrent_rows is not None:
        rows = min(rows, batch.recurrent_rows)
    if rows == 0:
        return
    heads, width, device = params.heads, params.head_dim, qkv.device
    shape = shape_of(params, pages.v.shape[2], qkv.dtype, prefill=False)
    split = split_size(params.kv_heads)
    splits = split_count(batch.block_tables.shape[1] * shape.page, split)
    assert splits <= MOST_SPLITS
    at_once = min(rows, max(1, SCRATCH_BYTES // (heads * splits * (width + 2) * 4)))
    partial = torch.empty(at_once, heads, splits, width, dtype=torch.float32, device=device)
    stats = torch.empty(at_once, heads, splits, 2, dtype=torch.float32, device=device)
    places = torch.empty(at_once if mixed else 1, dtype=torch.int64, device=device)
    for window in range(0, rows, at_once):
        if mixed:
            places.fill_(-1)
        _attend_splits[(splits, params.kv_heads, batch.starts.shape[0])](
            q,
            pages.k,
            pages.v,
            partial,
            stats,
            places,
            asked.positions,
            asked.start,
            batch.first_key,
            batch.chunked,
            batch.block_tables,
            batch.block_tables.stride(0),
            window,
            at_once,
            int(mixed),
            shape.scale,
            GROUP=shape.group,
            WIDTH=width,
            PAGE=shape.page,
            SPLIT=split,
            EQUAL=EQUAL,
            PER_OCTAVE=PER_OCTAVE,
            KEYS=shape.keys,
            LINES=shape.lines,
            DOT=shape.dot,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        _combine[(min(at_once, rows - window), heads)](
            qkv,
            partial,
            stats,
            out,
            places,
            asked.positions if asked.rows is None else asked.rows,
            asked.owners,
            asked.positions,
            batch.first_key,
            qkv.stride(0),
            splits,
            window,
            int(mixed),
            WIDTH=width,
            SPLIT=split,
            EQUAL=EQUAL,
            PER_OCTAVE=PER_OCTAVE,
            MOST_SPLITS=MOST_SPLITS,
            AT_ONCE=8,
            HAS_ROWS=asked.rows is not None,
            num_warps=2,
        )
