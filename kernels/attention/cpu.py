"""The attention mixer in numba: rows read pages together, and a row's bits depend on no other."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import prange
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.cpu_features import FEATURES
from kernels.curves import exp_less, sigmoid_of
from kernels.jit import (
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
    WIDE,
    add_products,
    larger,
    largest,
    load16,
    load32,
    number,
    plus,
    put,
    scaled,
    store,
    sum_of,
    times,
    zeros32,
)

# Columns at a time: with sums of two heads the registers are full, and none waits for another.
_LANES = 64 if "+avx512f" in FEATURES else 32
# Rows of a sequence that read its pages together, at most so many and as many as leave their scores
# in the L2: with a long context that is one.
_TOGETHER = 8
_SCORES = 2**16
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@inline
def _norm_rope(
    source: Any,
    at: Any,
    scale: Any,
    cos: Any,
    sin: Any,
    position: Any,
    eps: Any,
    out: Any,
    out_at: Any,
) -> None:
    """out[out_at:] = RoPE of the norm of source[at:][:hd], flat; cos, sin [positions, half]."""
    width, half = scale.shape[0], cos.shape[1]
    total = sum_of_squares(source, at, width)
    inverse = _ONE / np.sqrt(total / np.float32(width) + eps)
    scale_row(source, at, inverse, scale, out, out_at)
    other = out_at + half
    for i in range(half):
        first = out[out_at + i]
        second = out[other + i]
        out[out_at + i] = first * cos[position, i] - second * sin[position, i]
        out[other + i] = second * cos[position, i] + first * sin[position, i]


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
        _norm_rope(kv, at + g * width, k_norm, cos, sin, position, eps, room, 0)
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
def _softmax(scores: Any, at: Any, count: Any, first: Any, last: Any) -> Any:
    """scores[at:][first:last] become exp(score - the largest), the others of `count` 0.

    Returns their sum. The count must be a whole number of WIDE.
    """
    begin, end = at + first, at + last
    for j in range(at, begin):
        scores[j] = -np.float32(np.inf)
    for j in range(end, at + count):
        scores[j] = -np.float32(np.inf)
    top = load32(scores, at)
    for j in range(at + WIDE, at + count, WIDE):
        top = larger(top, load32(scores, j))
    best = largest(top)
    for j in range(at, at + count, WIDE):
        store(scores, j, exp_less(load32(scores, j), best))
    for j in range(at, begin):
        scores[j] = _ZERO
    for j in range(end, at + count):
        scores[j] = _ZERO
    total = zeros32()
    for j in range(at, at + count, WIDE):
        total = plus(total, load32(scores, j))
    return sum_of(total)


@inner
def attend_rows(
    qkv: Any,
    at: Any,
    stride: Any,
    count: Any,
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
    out_at: Any,
) -> None:
    """Gated attention of `count` rows of a sequence, of the query heads that share key head `g`.

    The rows are qkv[at:], flat and `stride` each, at positions from `position` on; out[out_at:]
    [count, nH hd]. They read a page together, since one that lies in the L1 is read in half the
    time; each row's sums are those that it has alone.
    """
    kv_heads, width, page = pages_k.shape[1], pages_k.shape[2], pages_k.shape[3]
    heads = (stride // width - 2 * kv_heads) // 2
    group = heads // kv_heads
    lines = count * group
    root = _ONE / np.sqrt(np.float32(width))
    first_block, blocks = oldest // page, (position + count + page - 1) // page
    span = (blocks - first_block) * page
    before = first_block * page
    query = np.empty(lines * width, np.float32)
    mixed = np.zeros(lines * width, np.float32)
    scores = np.zeros(lines * span, np.float32)
    totals = np.empty(lines, np.float32)
    for line in range(lines):
        row, head = line // group, g * group + line % group
        source, target = at + row * stride + head * width, line * width
        _norm_rope(qkv, source, q_norm, cos, sin, position + row, eps, query, target)
        for i in range(target, target + width):
            put(query, i, number(query, i) * root)
    for b in range(first_block, blocks):
        tile = (table[b] * kv_heads + g) * width * page
        seen_at = b * page - before
        _add_all(query, 0, lines, width, pages_k, tile, width, scores, seen_at, span, page)
    for line in range(lines):
        last = position + line // group + 1 - before
        totals[line] = _softmax(scores, line * span, span, oldest - before, last)
    for b in range(first_block, blocks):
        begin = b * page
        tile, seen_at = (table[b] * kv_heads + g) * page * width, begin - before
        first = max(0, oldest - begin)
        # All rows see the keys of the first one, and each of the others a few more. What lies
        # behind its own key is never multiplied: it need not be a number.
        common = max(first, min(page, position + 1 - begin))
        _add_all(
            scores,
            seen_at + first,
            lines,
            span,
            pages_v,
            tile + first * width,
            common - first,
            mixed,
            0,
            width,
            width,
        )
        for row in range(1, count):
            more = min(page, position + row + 1 - begin) - common
            if more > 0:
                _add_all(
                    scores,
                    row * group * span + seen_at + common,
                    group,
                    span,
                    pages_v,
                    tile + common * width,
                    more,
                    mixed,
                    row * group * width,
                    width,
                    width,
                )
    for line in range(lines):
        row, head = line // group, g * group + line % group
        gate_at = at + row * stride + (heads + head) * width
        target, source = out_at + (row * heads + head) * width, line * width
        inverse = _ONE / totals[line]
        whole = width // NARROW * NARROW
        for i in range(0, whole, NARROW):
            gate = sigmoid_of(load16(qkv, gate_at + i))
            store(out, target + i, times(scaled(load16(mixed, source + i), inverse), gate))
        for i in range(whole, width):
            gate = sigmoid32(number(qkv, gate_at + i))
            put(out, target + i, mixed[source + i] * inverse * gate)


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
    kv_heads, width, page = pages_k.shape[1], pages_k.shape[2], pages_k.shape[3]
    rows, group = positions.shape[0], out.shape[1] // width // kv_heads
    # As many together as leave every thread some.
    most = max(1, min(_TOGETHER, rows * kv_heads // threads))
    firsts = np.empty(rows + 1, np.int64)
    runs, left = 0, 0
    for r in range(rows):
        follows = r > 0 and row_segment[r] == row_segment[r - 1]
        if not left or not follows or positions[r] != positions[r - 1] + 1:
            firsts[runs] = r
            runs += 1
            left = max(1, min(most, _SCORES // (group * (positions[r] + page))))
        left -= 1
    firsts[runs] = rows
    # In turn, since later rows of a prompt take longer.
    for thread in prange(threads):
        for item in range(np.int64(thread), runs * kv_heads, threads):
            first, end = firsts[item // kv_heads], firsts[item // kv_heads + 1]
            owner = row_segment[first]
            attend_rows(
                qkv,
                first * qkv.shape[1],
                qkv.shape[1],
                end - first,
                item % kv_heads,
                q_norm,
                cos,
                sin,
                eps,
                positions[first],
                block_tables[owner],
                first_key[owner],
                pages_k,
                pages_v,
                out,
                first * out.shape[1],
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
