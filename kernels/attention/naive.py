"""The truth of the attention mixer, in torch, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.rms_norm.naive import rms_norm


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, heads, hd]; the first 2 * cos.shape[1] dims turn in pairs (i, i + half), NeoX style.

    cos, sin: [R, half] of the rows' positions.
    """
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


def _wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 when it is that."""
    return x if x.dtype == torch.float64 else x.float()


def attention_mixer(
    qkv: Tensor,
    params: AttentionParams,
    pages: KvPages,
    batch: RaggedBatch,
    wanted: Tensor | None = None,
) -> Tensor:
    """qkv [R, 2 nH hd + 2 nKV hd], columns [q | gate | k | v] -> [R, nH hd], gated.

    Writes k and v of every row into its sequence's pages; a row sees itself and all before it,
    back to `first_key`. With `wanted` [n] int64 the result has these rows only. Computed in
    float32, or in float64 when qkv is that.
    """
    heads, kv_heads, width = params.heads, params.kv_heads, params.head_dim
    sizes = (heads * width, heads * width, kv_heads * width, kv_heads * width)
    q, gate, k, v = _wide(qkv).split(sizes, dim=-1)
    cos, sin = params.cos[batch.positions], params.sin[batch.positions]
    q = apply_rope(rms_norm(q.unflatten(-1, (heads, width)), params.q_norm, params.eps), cos, sin)
    k = apply_rope(
        rms_norm(k.unflatten(-1, (kv_heads, width)), params.k_norm, params.eps), cos, sin
    )
    v = v.unflatten(-1, (kv_heads, width))

    page = pages.v.shape[2]
    blocks = batch.block_tables[batch.row_segment, batch.positions // page]
    offsets = batch.positions % page
    pages.k[blocks, :, :, offsets] = k.to(pages.k.dtype)
    pages.v[blocks, :, offsets] = v.to(pages.v.dtype)

    row_start = batch.row_start.tolist()
    starts = batch.starts.tolist()
    out = torch.empty(qkv.shape[0], heads * width, dtype=qkv.dtype, device=qkv.device)
    for s, (start, oldest) in enumerate(zip(starts, batch.first_key.tolist(), strict=True)):
        rows = slice(row_start[s], row_start[s + 1])
        if rows.start == rows.stop:
            continue
        end = start + row_start[s + 1] - row_start[s]
        table = batch.block_tables[s, : -(-end // page)]
        keys = pages.k[table].to(q.dtype).permute(1, 0, 3, 2).flatten(1, 2)[:, oldest:end]
        values = pages.v[table].to(q.dtype).transpose(0, 1).flatten(1, 2)[:, oldest:end]
        keys = keys.repeat_interleave(heads // kv_heads, 0)
        values = values.repeat_interleave(heads // kv_heads, 0)
        scores = q[rows].transpose(0, 1) @ keys.mT * width**-0.5  # [nH, rows, end]
        own = batch.positions[rows]
        unseen = torch.arange(oldest, end, device=qkv.device) > own[:, None]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        mixed = (weights @ values).transpose(0, 1).flatten(1)
        out[rows] = (mixed * torch.sigmoid(gate[rows])).to(qkv.dtype)
    return out if wanted is None else out[wanted]
