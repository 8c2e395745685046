"""The attention mixer in numba: each row walks its own pages and depends on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.jit import exp32, host, inline, parallel_kernel, sigmoid32, sum_of_squares

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@inline
def _norm_rope(source: Any, scale: Any, cos: Any, sin: Any, eps: Any, out: Any) -> None:
    """out [hd] = RoPE of the norm of source [hd]; cos, sin [half] of its position."""
    width = source.shape[0]
    half = cos.shape[0]
    inverse = _ONE / np.sqrt(sum_of_squares(source) / np.float32(width) + eps)
    for i in range(width):
        out[i] = source[i] * inverse * scale[i]
    for i in range(half):
        first = out[i]
        second = out[half + i]
        out[i] = first * cos[i] - second * sin[i]
        out[half + i] = second * cos[i] + first * sin[i]


@inline
def write_row(
    kv: Any,
    k_norm: Any,
    cos: Any,
    sin: Any,
    eps: Any,
    position: Any,
    table: Any,
    pages_k: Any,
    pages_v: Any,
) -> None:
    """Put one row's key and value, kv [2 nKV hd], into its sequence's pages; table [B] blocks."""
    kv_heads, width, page = pages_k.shape[1], pages_k.shape[2], pages_k.shape[3]
    block = table[position // page]
    offset = position % page
    key = np.empty(width, np.float32)
    for g in range(kv_heads):
        base = g * width
        _norm_rope(kv[base : base + width], k_norm, cos[position], sin[position], eps, key)
        for i in range(width):
            pages_k[block, g, i, offset] = key[i]
        base += kv_heads * width
        for i in range(width):
            pages_v[block, g, offset, i] = kv[base + i]


@inline
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
    # Four keys, then four values, are added at a time, in the same order as one by one: sums are
    # loaded and stored a fourth as often.
    fours = width // 4 * 4
    keys = position + 1
    blocks = (keys + page - 1) // page
    first_block = oldest // page
    query = np.empty(width, np.float32)
    scores = np.empty((blocks, page), np.float32)
    mixed = np.empty(width, np.float32)
    sums = np.empty(page, np.float32)
    for member in range(group):
        head = g * group + member
        _norm_rope(
            qkv[head * width : (head + 1) * width],
            q_norm,
            cos[position],
            sin[position],
            eps,
            query,
        )
        best = np.float32(-np.inf)
        for b in range(first_block, blocks):
            tile = pages_k[table[b], g]
            score = scores[b]
            for j in range(page):
                score[j] = _ZERO
            for i in range(0, fours, 4):
                w0, w1 = query[i] * root, query[i + 1] * root
                w2, w3 = query[i + 2] * root, query[i + 3] * root
                k0, k1, k2, k3 = tile[i], tile[i + 1], tile[i + 2], tile[i + 3]
                for j in range(page):
                    score[j] = score[j] + w0 * k0[j] + w1 * k1[j] + w2 * k2[j] + w3 * k3[j]
            for i in range(fours, width):
                weight = query[i] * root
                key = tile[i]
                for j in range(page):
                    score[j] += weight * key[j]
            seen = min(page, keys - b * page)
            for j in range(max(0, oldest - b * page), seen):
                best = max(best, score[j])
        for j in range(page):
            sums[j] = _ZERO
        for i in range(width):
            mixed[i] = _ZERO
        for b in range(first_block, blocks):
            tile_v = pages_v[table[b], g]
            score = scores[b]
            seen = min(page, keys - b * page)
            skipped = max(0, oldest - b * page)
            # Slices, as a loop from one bound to another is not compiled to vectors.
            visible, total_of = score[skipped:seen], sums[skipped:seen]
            for j in range(visible.shape[0]):
                visible[j] = exp32(visible[j] - best)
                total_of[j] += visible[j]
            whole = skipped + max(0, seen - skipped) // 4 * 4
            for j in range(skipped, whole, 4):
                w0, w1, w2, w3 = score[j], score[j + 1], score[j + 2], score[j + 3]
                v0, v1, v2, v3 = tile_v[j], tile_v[j + 1], tile_v[j + 2], tile_v[j + 3]
                for i in range(width):
                    mixed[i] = mixed[i] + w0 * v0[i] + w1 * v1[i] + w2 * v2[i] + w3 * v3[i]
            for j in range(whole, seen):
                weight = score[j]
                value = tile_v[j]
                for i in range(width):
                    mixed[i] += weight * value[i]
        total = _ZERO
        for j in range(page):
            total += sums[j]
        inverse = _ONE / total
        base = head * width
        gate_base = heads * width + base
        for i in range(width):
            out[base + i] = mixed[i] * inverse * sigmoid32(qkv[gate_base + i])


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
    kv_base = qkv.shape[1] - 2 * pages_k.shape[1] * pages_k.shape[2]
    for r in prange(positions.shape[0]):
        table = block_tables[row_segment[r]]
        write_row(qkv[r, kv_base:], k_norm, cos, sin, eps, positions[r], table, pages_k, pages_v)


@parallel_kernel
def _attend(
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
    for item in prange(positions.shape[0] * kv_heads):
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
