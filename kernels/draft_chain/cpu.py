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

from kernels.attention.cpu import attend_group, write_row
from kernels.cpu_features import BFLOAT16, BYTES
from kernels.draft_chain.products import (
    BLOCK,
    MANY,
    block_products,
    fast,
    in_form,
    products,
    takes_many,
    wide,
)
from kernels.draft_chain.types import Chain, ChainStart, ChainWeights, Drafts
from kernels.jit import exp32, inline, parallel_kernel, sigmoid32
from kernels.lanes import first_equal, load16
from kernels.tiles import LANES

# How far from the truth it may be, as a share of its length: every product rounds its matrix and
# its rows to 255 steps, or its rows to bfloat16.
TOLERANCE = 5e-2 if BYTES else 1e-2 if BFLOAT16 else 1e-5


@fast
def _scaled(x: Any, scale: Any, eps: Any, out: Any) -> None:
    """out [H] = the norm of x [H]."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * inverse * scale[i]


@fast
def _copy(source: Any, target: Any) -> None:
    """What an assignment does, whose checks of shapes take three seconds to compile."""
    for i in range(source.shape[0]):
        target[i] = source[i]


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
    total = np.float32(0.0)
    for i in range(logits.shape[0]):
        total += exp32(logits[i] - top)
    return place, -np.log(total)


@fast
def _enter(
    tokens: Any, hidden: Any, rows: Any, matrices: Any, scales: Any, eps: Any, residual: Any
) -> None:
    """residual [n, H] = fc over the norms of the embeddings and of hidden [n, H].

    n, here and in _write_rows, is BLOCK, or MANY where the CPU takes so many.
    """
    width = hidden.shape[1]
    joined = np.zeros((hidden.shape[0], 2 * width), np.float32)
    embedded = np.empty(width, np.float32)
    for r in range(rows):
        source = matrices[0][tokens[r]]
        for i in range(width):
            embedded[i] = wide(source[i])
        _scaled(embedded, scales[0], eps, joined[r, :width])
        _scaled(hidden[r], scales[1], eps, joined[r, width:])
    block_products(matrices[1], joined, rows, residual)


@fast
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
    """Leave keys and values of rows of the first pass; `chosen`: their indices, at most height."""
    rows, width = chosen.shape[0], hidden.shape[1]
    _, k_norm, cos, sin, pages_k, pages_v = attention
    kv_width = 2 * pages_k.shape[1] * pages_k.shape[2]
    qkv_weight = matrices[2]
    own_tokens = np.zeros(height, np.int64)
    own_hidden = np.zeros((height, width), np.float32)
    for r in range(rows):
        s = owners[chosen[r]]
        own_tokens[r] = tokens[chosen[r]]
        _copy(hidden[first_hidden[s] + chosen[r] - row_start[s]], own_hidden[r])
    residual = np.empty((height, width), np.float32)
    normed = np.zeros((height, width), np.float32)
    _enter(own_tokens, own_hidden, rows, matrices, scales, eps, residual)
    for r in range(rows):
        _scaled(residual[r], scales[2], eps, normed[r])
    kv = np.empty((height, kv_width), np.float32)
    kv_weight = qkv_weight[qkv_weight.shape[0] - kv_width // LANES :]
    block_products(kv_weight, normed, rows, kv)
    for r in range(rows):
        s = owners[chosen[r]]
        position = begins[s] + chosen[r] - row_start[s]
        write_row(kv[r], k_norm, cos, sin, eps, position, tables[s], pages_k, pages_v)


@fast
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
    _, _, qkv_weight, o, gate_up, down, head = matrices
    q_norm, k_norm, cos, sin, pages_k, pages_v = attention
    width, inner = hidden.shape[1], LANES * gate_up.shape[0] // 2
    kv_base = LANES * qkv_weight.shape[0] - 2 * pages_k.shape[1] * pages_k.shape[2]
    own_tokens = np.zeros(BLOCK, np.int64)
    at = np.zeros(BLOCK, np.int64)
    state = np.zeros((BLOCK, width), np.float32)
    deepest = 0
    for r in range(rows):
        s = first + r
        row = row_start[s + 1] - 1
        own_tokens[r] = tokens[row]
        at[r] = begins[s] + row - row_start[s]
        _copy(hidden[first_hidden[s] + row - row_start[s]], state[r])
        deepest = max(deepest, depths[s])
    residual = np.empty((BLOCK, width), np.float32)
    normed = np.zeros((BLOCK, width), np.float32)
    added = np.empty((BLOCK, width), np.float32)
    qkv = np.empty((BLOCK, LANES * qkv_weight.shape[0]), np.float32)
    mixed = np.zeros((BLOCK, kv_base // 2), np.float32)
    gates = np.empty((BLOCK, 2 * inner), np.float32)
    acted = np.zeros((BLOCK, inner), np.float32)
    logits = np.empty((BLOCK, LANES * head.shape[0]), np.float32)
    for depth in range(deepest):
        _enter(own_tokens, state, rows, matrices, scales, eps, residual)
        for r in range(rows):
            _scaled(residual[r], scales[2], eps, normed[r])
        products(qkv_weight, normed, rows, qkv)
        for r in range(rows):
            s = first + r
            if depth >= depths[s]:
                continue  # its rows would lie behind its pages; what it computes is not read
            table = tables[s]
            write_row(qkv[r, kv_base:], k_norm, cos, sin, eps, at[r], table, pages_k, pages_v)
            for group in range(pages_k.shape[1]):
                attend_group(
                    qkv[r],
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
                    mixed[r],
                )
        products(o, mixed, rows, added)
        for r in range(rows):
            for i in range(width):
                residual[r, i] += added[r, i]
            _scaled(residual[r], scales[3], eps, normed[r])
        products(gate_up, normed, rows, gates)
        for r in range(rows):
            for i in range(inner):
                acted[r, i] = gates[r, i] * sigmoid32(gates[r, i]) * gates[r, inner + i]
        products(down, acted, rows, added)
        for r in range(rows):
            for i in range(width):
                residual[r, i] += added[r, i]
            _scaled(residual[r], scales[4], eps, state[r])
        products(head, state, rows, logits)
        for r in range(rows):
            place, logprob = _best(logits[r])
            ids[first + r, depth] = place
            logprobs[first + r, depth] = logprob
            own_tokens[r] = place
            at[r] += 1


@fast
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
    tiles = (in_form(matrix).numpy() for matrix in (w.fc, w.qkv, w.o, w.gate_up, w.down, w.head))
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
