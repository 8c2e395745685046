"""The attention mixer in numba: each row walks its own pages and depends on nothing else."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import prange
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.cpu_features import FEATURES
from kernels.jit import (
    exp32,
    host,
    inline,
    inner,
    parallel_kernel,
    scale_row,
    sigmoid32,
    sum_of_squares,
)
from kernels.lanes import (
    NARROW,
    add_products,
    larger,
    largest,
    load16,
    number,
    plus,
    put,
    store,
    sum_of,
    zeros16,
)

# Columns at a time: with sums of two heads the registers are full, and none waits for another.
_LANES = 64 if "+avx512f" in FEATURES else 32
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@inline
def _norm_rope(
    source: Any, at: Any, scale: Any, cos: Any, sin: Any, position: Any, eps: Any, out: Any
) -> None:
    """out [hd] = RoPE of the norm of source[at:][:hd], flat; cos, sin [positions, half]."""
    width, half = scale.shape[0], cos.shape[1]
    total = sum_of_squares(source, at, width)
    inverse = _ONE / np.sqrt(total / np.float32(width) + eps)
    scale_row(source, at, inverse, scale, out, 0)
    for i in range(half):
        first = out[i]
        second = out[half + i]
        out[i] = first * cos[position, i] - second * sin[position, i]
        out[half + i] = second * cos[position, i] + first * sin[position, i]


@inline
def write_row(
    kv: Any,
    at: Any,
    room: Any,
    k_norm: Any,
    cos: Any,
    sin: Any,
    eps: Any,
    position: Any,
    table: Any,
    pages_k: Any,
    pages_v: Any,
) -> None:
    """Put one row's key and value, kv[at:][:2 nKV hd] flat, into its sequence's pages.

    table [B] blocks; room: scratch of hd numbers.
    """
    kv_heads, width, page = pages_k.shape[1], pages_k.shape[2], pages_k.shape[3]
    block = table[position // page]
    offset = position % page
    whole = width // NARROW * NARROW
    for g in range(kv_heads):
        _norm_rope(kv, at + g * width, k_norm, cos, sin, position, eps, room)
        target = (block * kv_heads + g) * width * page
        for i in range(width):
            put(pages_k, target + i * page + offset, number(room, i))
        source = at + (kv_heads + g) * width
        target += offset * width
        for i in range(0, whole, NARROW):
            store(pages_v, target + i, load16(kv, source + i))
        for i in range(whole, width):
            put(pages_v, target + i, number(kv, source + i))


@inner
def _add_all(
    left: Any,
    left_at: Any,
    heads: Any,
    stride: Any,
    right: Any,
    right_at: Any,
    steps: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    width: Any,
) -> None:
    """out [heads, width] += left [heads, steps] times right [steps, width], in order of steps.

    Flat places and strides as in add_products; a row of right is `width` numbers.
    """
    wide, narrow = width // _LANES * _LANES, width // NARROW * NARROW
    pairs = heads // 2 * 2
    for head in range(0, pairs, 2):
        a, c = left_at + head * stride, out_at + head * out_stride
        for j in range(0, wide, _LANES):
            b = right_at + j
            add_products(left, a, stride, 2, right, b, width, steps, out, c + j, out_stride, _LANES)
    for head in range(heads):
        a, c = left_at + head * stride, out_at + head * out_stride
        if head >= pairs:
            for j in range(0, wide, _LANES):
                b = right_at + j
                add_products(left, a, 0, 1, right, b, width, steps, out, c + j, 0, _LANES)
        for j in range(wide, narrow, NARROW):
            b = right_at + j
            add_products(left, a, 0, 1, right, b, width, steps, out, c + j, 0, NARROW)
        for j in range(narrow, width):
            b = right_at + j
            add_products(left, a, 0, 1, right, b, width, steps, out, c + j, 0, 1)


@inner
def _softmax(scores: Any, first: Any, last: Any) -> Any:
    """scores[first:last] become exp(score - the largest), the others 0; returns their sum.

    There must be a whole number of NARROW.
    """
    end = scores.shape[0]
    for j in range(first):
        scores[j] = -np.float32(np.inf)
    for j in range(last, end):
        scores[j] = -np.float32(np.inf)
    top = load16(scores, 0)
    for j in range(NARROW, end, NARROW):
        top = larger(top, load16(scores, j))
    best = largest(top)
    # A slice, as a loop from one bound to another is not compiled to vectors.
    visible = scores[first:last]
    for j in range(visible.shape[0]):
        visible[j] = exp32(visible[j] - best)
    for j in range(first):
        scores[j] = _ZERO
    for j in range(last, end):
        scores[j] = _ZERO
    total = zeros16()
    for j in range(0, end, NARROW):
        total = plus(total, load16(scores, j))
    return sum_of(total)


@inner
def attend_group(
    qkv: Any,
    g: Any,
    q_norm: Any,
    cos: Any,
    sin: Any,
    eps: Any,
    position: Any,
    table: Any,
    oldest: Any,
    pages_k: Any,
    pages_v: Any,
    out: Any,
) -> None:
    """Gated attention of one row's query heads that share key head `g`; out [nH hd]."""
    kv_heads, width, page = pages_k.shape[1], pages_k.shape[2], pages_k.shape[3]
    heads = out.shape[0] // width
    group = heads // kv_heads
    root = _ONE / np.sqrt(np.float32(width))
    keys = position + 1
    first_block, blocks = oldest // page, (keys + page - 1) // page
    span = (blocks - first_block) * page
    before = first_block * page
    query = np.empty((group, width), np.float32)
    mixed = np.zeros((group, width), np.float32)
    scores = np.zeros((group, span), np.float32)
    for member in range(group):
        base = (g * group + member) * width
        turned = query[member]
        _norm_rope(qkv, base, q_norm, cos, sin, position, eps, turned)
        for i in range(width):
            turned[i] *= root
    for b in range(first_block, blocks):
        tile = (table[b] * kv_heads + g) * width * page
        at = b * page - before
        _add_all(query, 0, group, width, pages_k, tile, width, scores, at, span, page)
    totals = np.empty(group, np.float32)
    for member in range(group):
        totals[member] = _softmax(scores[member], oldest - before, keys - before)
    for b in range(first_block, blocks):
        skipped = max(0, oldest - b * page)
        seen = min(page, keys - b * page)
        # What lies behind the last key is never multiplied: it need not be a number.
        tile = ((table[b] * kv_heads + g) * page + skipped) * width
        at = b * page - before + skipped
        _add_all(scores, at, group, span, pages_v, tile, seen - skipped, mixed, 0, width, width)
    for member in range(group):
        base = (g * group + member) * width
        gate_base = heads * width + base
        inverse = _ONE / totals[member]
        for i in range(width):
            out[base + i] = mixed[member, i] * inverse * sigmoid32(qkv[gate_base + i])


@parallel_kernel
def _write(
    qkv: Any,
    k_norm: Any,
    cos: Any,
    sin: Any,
    eps: Any,
    positions: Any,
    row_segment: Any,
    block_tables: Any,
    pages_k: Any,
    pages_v: Any,
) -> None:
    wide = qkv.shape[1]
    kv_base = wide - 2 * pages_k.shape[1] * pages_k.shape[2]
    for r in prange(positions.shape[0]):
        at, table = r * wide + kv_base, block_tables[row_segment[r]]
        room = np.empty(pages_k.shape[2], np.float32)
        write_row(qkv, at, room, k_norm, cos, sin, eps, positions[r], table, pages_k, pages_v)


@parallel_kernel
def _attend(
    threads: Any,
    qkv: Any,
    q_norm: Any,
    cos: Any,
    sin: Any,
    eps: Any,
    positions: Any,
    row_segment: Any,
    block_tables: Any,
    first_key: Any,
    pages_k: Any,
    pages_v: Any,
    out: Any,
) -> None:
    kv_heads = pages_k.shape[1]
    # In turn, since later rows of a prompt take longer.
    for thread in prange(threads):
        for item in range(np.int64(thread), positions.shape[0] * kv_heads, threads):
            r = item // kv_heads
            owner = row_segment[r]
            attend_group(
                qkv[r],
                item % kv_heads,
                q_norm,
                cos,
                sin,
                eps,
                positions[r],
                block_tables[owner],
                first_key[owner],
                pages_k,
                pages_v,
                out[r],
            )


def attention_mixer(
    qkv: Tensor,
    params: AttentionParams,
    pages: KvPages,
    batch: RaggedBatch,
    wanted: Tensor | None = None,
) -> Tensor:
    """As naive.attention_mixer, float32; rows that are not wanted only leave keys and values."""
    positions, owners = batch.positions, batch.row_segment
    cos, sin, eps = host(params.cos), host(params.sin), np.float32(params.eps)
    tables = batch.block_tables.numpy()
    k, v = host(pages.k), host(pages.v)
    _write(
        qkv.numpy(),
        host(params.k_norm),
        cos,
        sin,
        eps,
        positions.numpy(),
        owners.numpy(),
        tables,
        k,
        v,
    )
    if wanted is not None:
        qkv, positions, owners = qkv[wanted], positions[wanted], owners[wanted]
    out = qkv.new_empty(qkv.shape[0], params.heads * params.head_dim)
    _attend(
        numba.get_num_threads(),
        qkv.numpy(),
        host(params.q_norm),
        cos,
        sin,
        eps,
        positions.numpy(),
        owners.numpy(),
        tables,
        batch.first_key.numpy(),
        k,
        v,
        out.numpy(),
    )
    return out
