"""The chain in numba: for a few rows the calls of a pass cost more than its products.

Sequences are independent of each other, so each thread runs some of them from the first row to the
last draft without waiting for another.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange

from kernels.attention.cpu import attend_rows, write_row
from kernels.cpu_features import BFLOAT16, BYTES
from kernels.curves import exp_less, silu_of
from kernels.draft_chain.products import (
    BLOCK,
    FORM,
    MANY,
    block_products,
    fast,
    fast_inner,
    products,
    takes_many,
    wide,
)
from kernels.draft_chain.types import Chain, ChainStart, ChainWeights, Drafts
from kernels.jit import inline, parallel_kernel, scale_row, sum_of_squares
from kernels.lanes import (
    NARROW,
    copy,
    first_equal,
    load16,
    load16_upper,
    plus,
    store,
    sum_of,
    times,
    zeros16,
)
from kernels.tiles import LANES

# How far from the truth it may be, as a share of its length: every product rounds its matrix and
# its rows to 255 steps, or its rows to bfloat16.
TOLERANCE = 5e-2 if BYTES else 1e-2 if BFLOAT16 else 1e-5

_new_words, _take = FORM.rows, FORM.take


@inline
def _scaled(x: Any, at: Any, scale: Any, eps: Any, out: Any, out_at: Any) -> None:
    """out[out_at:] = the norm of x[at:], both flat; as many as scale [H] has."""
    mean = sum_of_squares(x, at, scale.shape[0]) / np.float32(scale.shape[0])
    scale_row(x, at, np.float32(1.0) / np.sqrt(mean + eps), scale, out, out_at)


@fast_inner
def _take_norm(x: Any, at: Any, scale: Any, eps: Any, room: Any, words: Any, r: Any) -> None:
    """Line r of words = the norm of x[at:], flat; room: scratch of as many float32."""
    _scaled(x, at, scale, eps, room, 0)
    _take(room, 0, scale.shape[0], words, r)


@inline
def _ordered(bits: Any) -> Any:
    """A float32 as an int32 in the same order, and back."""
    return np.int32(bits ^ np.int32((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@fast
def _best(logits: Any) -> Any:
    """(most likely id, its log-probability) of logits [V]."""
    # As integers in the order of the floats: a maximum of floats would not vectorise.
    highest = np.int32(-(2**31))
    for i in range(logits.shape[0]):
        highest = np.int32(max(highest, _ordered(np.float32(logits[i]).view(np.int32))))
    top = np.int32(_ordered(highest)).view(np.float32)
    # The vocabulary is a whole number of tiles.
    place, lane = 0, LANES
    while lane == LANES and place < logits.shape[0]:
        lane = first_equal(load16(logits, place), top)
        place += LANES
    place = min(place - LANES + lane, logits.shape[0] - 1)
    total = zeros16()
    for i in range(0, logits.shape[0], LANES):
        total = plus(total, exp_less(load16(logits, i), top))
    return place, -np.log(sum_of(total))


@fast_inner
def _take_joined(
    embed: Any,
    token: Any,
    embed_scale: Any,
    hidden: Any,
    at: Any,
    hidden_scale: Any,
    eps: Any,
    room: Any,
    words: Any,
    r: Any,
) -> None:
    """Line r of words = the norms of a token's embedding and of hidden[at:][:H], flat.

    room: scratch of 3 H float32.
    """
    width = embed_scale.shape[0]
    source, target = token * width, 2 * width
    whole = width // NARROW * NARROW
    for i in range(0, whole, NARROW):
        store(room, target + i, load16_upper(embed, source + i))
    for i in range(whole, width):
        room[target + i] = wide(embed[token, i])
    _scaled(room, target, embed_scale, eps, room, 0)
    _scaled(hidden, at, hidden_scale, eps, room, width)
    _take(room, 0, 2 * width, words, r)


@fast_inner
def _write_rows(
    height: Any,
    chosen: Any,
    tokens: Any,
    hidden: Any,
    row_start: Any,
    begins: Any,
    first_hidden: Any,
    owners: Any,
    tables: Any,
    matrices: Any,
    scales: Any,
    attention: Any,
    eps: Any,
) -> None:
    """Leave keys and values of rows of the first pass; `chosen`: their indices, at most height.

    height is BLOCK, or MANY where the CPU takes so many.
    """
    rows, width = chosen.shape[0], hidden.shape[1]
    _, k_norm, cos, sin, pages_k, pages_v = attention
    kv_width = 2 * pages_k.shape[1] * pages_k.shape[2]
    embed, fc, qkv_weight = matrices[:3]
    room = np.empty(max(3 * width, pages_k.shape[2]), np.float32)
    words = _new_words(height, 2 * width)
    for r in range(rows):
        row = chosen[r]
        s = owners[row]
        at = (first_hidden[s] + row - row_start[s]) * width
        _take_joined(embed, tokens[row], scales[0], hidden, at, scales[1], eps, room, words, r)
    residual = np.empty((height, width), np.float32)
    block_products(fc, words, rows, residual)
    words = _new_words(height, width)
    for r in range(rows):
        _take_norm(residual, r * width, scales[2], eps, room, words, r)
    kv = np.empty((height, kv_width), np.float32)
    kv_weight = qkv_weight[qkv_weight.shape[0] - kv_width // LANES :]
    block_products(kv_weight, words, rows, kv)
    for r in range(rows):
        s = owners[chosen[r]]
        at = begins[s] + chosen[r] - row_start[s]
        write_row(kv, r * kv_width, room, k_norm, cos, sin, eps, at, tables[s], pages_k, pages_v)


@fast_inner
def _draft(
    first: Any,
    rows: Any,
    tokens: Any,
    hidden: Any,
    row_start: Any,
    begins: Any,
    first_hidden: Any,
    tables: Any,
    first_key: Any,
    depths: Any,
    matrices: Any,
    scales: Any,
    attention: Any,
    eps: Any,
    ids: Any,
    logprobs: Any,
) -> None:
    """Drafts of the sequences first .. first + rows - 1, beginning with the last row of each."""
    embed, fc, qkv_weight, o, gate_up, down, head = matrices
    q_norm, k_norm, cos, sin, pages_k, pages_v = attention
    width, inner = hidden.shape[1], LANES * gate_up.shape[0] // 2
    qkv_width = LANES * qkv_weight.shape[0]
    kv_base = qkv_width - 2 * pages_k.shape[1] * pages_k.shape[2]
    own_tokens = np.zeros(BLOCK, np.int64)
    at = np.zeros(BLOCK, np.int64)
    state = np.empty((BLOCK, width), np.float32)
    deepest = 0
    for r in range(rows):
        s = first + r
        row = row_start[s + 1] - 1
        own_tokens[r] = tokens[row]
        at[r] = begins[s] + row - row_start[s]
        copy(hidden, (first_hidden[s] + row - row_start[s]) * width, state, r * width, width)
        deepest = max(deepest, depths[s])
    residual = np.empty((BLOCK, width), np.float32)
    added = np.empty((BLOCK, width), np.float32)
    qkv = np.empty((BLOCK, qkv_width), np.float32)
    mixed = np.zeros(kv_base // 2, np.float32)
    gates = np.empty((BLOCK, 2 * inner), np.float32)
    acted = np.empty(inner, np.float32)
    logits = np.empty((BLOCK, LANES * head.shape[0]), np.float32)
    room = np.empty(max(3 * width, pages_k.shape[2]), np.float32)
    joined_words, words = _new_words(BLOCK, 2 * width), _new_words(BLOCK, width)
    mixed_words, acted_words = _new_words(BLOCK, kv_base // 2), _new_words(BLOCK, inner)
    for depth in range(deepest):
        for r in range(rows):
            at_state = r * width
            _take_joined(
                embed,
                own_tokens[r],
                scales[0],
                state,
                at_state,
                scales[1],
                eps,
                room,
                joined_words,
                r,
            )
        products(fc, joined_words, rows, residual)
        for r in range(rows):
            _take_norm(residual, r * width, scales[2], eps, room, words, r)
        products(qkv_weight, words, rows, qkv)
        for r in range(rows):
            s = first + r
            if depth < depths[s]:  # its rows would lie behind its pages else
                table, kv_at = tables[s], r * qkv_width + kv_base
                write_row(qkv, kv_at, room, k_norm, cos, sin, eps, at[r], table, pages_k, pages_v)
                for group in range(pages_k.shape[1]):
                    attend_rows(
                        qkv,
                        r * qkv_width,
                        qkv_width,
                        1,
                        group,
                        q_norm,
                        cos,
                        sin,
                        eps,
                        at[r],
                        table,
                        first_key[s],
                        pages_k,
                        pages_v,
                        mixed,
                        0,
                    )
            _take(mixed, 0, kv_base // 2, mixed_words, r)
        products(o, mixed_words, rows, added)
        for r in range(rows):
            for i in range(width):
                residual[r, i] += added[r, i]
            _take_norm(residual, r * width, scales[3], eps, room, words, r)
        products(gate_up, words, rows, gates)
        for r in range(rows):
            gate_at = 2 * r * inner
            for i in range(0, inner, LANES):
                up = load16(gates, gate_at + inner + i)
                store(acted, i, times(silu_of(load16(gates, gate_at + i)), up))
            _take(acted, 0, inner, acted_words, r)
        products(down, acted_words, rows, added)
        for r in range(rows):
            for i in range(width):
                residual[r, i] += added[r, i]
            _scaled(residual, r * width, scales[4], eps, state, r * width)
            _take(state, r * width, width, words, r)
        products(head, words, rows, logits)
        for r in range(rows):
            place, logprob = _best(logits[r])
            ids[first + r, depth] = place
            logprobs[first + r, depth] = logprob
            own_tokens[r] = place
            at[r] += 1


@fast_inner
def _caught_up(row_start: Any, depths: Any) -> Any:
    """(indices [n] of the rows that only leave keys and values, the sequence of each row [R])."""
    total = row_start[row_start.shape[0] - 1]
    chosen = np.empty(total, np.int64)
    owners = np.empty(total, np.int64)
    count = 0
    for s in range(depths.shape[0]):
        for row in range(row_start[s], row_start[s + 1]):
            owners[row] = s
            if depths[s] == 0 or row + 1 < row_start[s + 1]:
                chosen[count] = row
                count += 1
    return chosen[:count], owners


@parallel_kernel
def _chain(
    threads: Any,
    height: Any,
    tokens: Any,
    hidden: Any,
    row_start: Any,
    begins: Any,
    first_hidden: Any,
    tables: Any,
    first_key: Any,
    depths: Any,
    matrices: Any,
    scales: Any,
    attention: Any,
    eps: Any,
    ids: Any,
    logprobs: Any,
) -> None:
    sequences = depths.shape[0]
    written, owners = _caught_up(row_start, depths)
    # A few rows for each thread are faster without the padding that many take.
    height = height if written.shape[0] > BLOCK * threads else BLOCK
    for drafting in range(2):
        # One loop for both: a parallel loop of its own takes three seconds to compile.
        items = sequences if drafting else written.shape[0]
        size = min(BLOCK if drafting else height, max(1, (items + threads - 1) // threads))
        for b in prange((items + size - 1) // size):
            if drafting:
                _draft(
                    b * size,
                    min(size, items - b * size),
                    tokens,
                    hidden,
                    row_start,
                    begins,
                    first_hidden,
                    tables,
                    first_key,
                    depths,
                    matrices,
                    scales,
                    attention,
                    eps,
                    ids,
                    logprobs,
                )
            else:
                _write_rows(
                    height,
                    written[b * size : (b + 1) * size],
                    tokens,
                    hidden,
                    row_start,
                    begins,
                    first_hidden,
                    owners,
                    tables,
                    matrices,
                    scales,
                    attention,
                    eps,
                )


def draft_chain(weights: ChainWeights) -> Chain:
    """As naive.draft_chain of these weights; what lies beyond a sequence's depth was never written.

    Matrices are copied into tiles, the embeddings and pages are seen where they are.
    """
    w, a = weights, weights.attention
    embed = w.embed.view(torch.uint16).numpy()
    tiles = (
        FORM.matrix(matrix).numpy() for matrix in (w.fc, w.qkv, w.o, w.gate_up, w.down, w.head)
    )
    matrices = (embed, *tiles)
    norms = (w.norm_embedding, w.norm_hidden, w.input_norm, w.post_norm, w.norm)
    scales = tuple(norm.numpy() for norm in norms)
    layer = (a.q_norm, a.k_norm, a.cos, a.sin, w.pages.k, w.pages.v)
    attention = tuple(tensor.numpy() for tensor in layer)
    eps = np.float32(a.eps)
    width = w.fc.shape[0]
    height = MANY if takes_many(width, 2 * width) else BLOCK

    def chain(start: ChainStart) -> Drafts:
        sequences = len(start.depths)
        shape = sequences, max(start.depths.tolist())
        ids, logprobs = np.empty(shape, np.int64), np.empty(shape, np.float32)
        _chain(
            numba.get_num_threads(),
            height,
            start.tokens,
            start.hidden.numpy(),
            start.row_start,
            start.begins,
            start.first_hidden,
            start.block_tables,
            start.first_key,
            start.depths,
            matrices,
            scales,
            attention,
            eps,
            ids,
            logprobs,
        )
        return ids, logprobs

    return chain
