"""The truth of the chain, in torch, out of the other operators' truths."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.attention.naive import attention_mixer
from kernels.batch import RaggedBatch
from kernels.draft_chain.types import ChainStart, ChainWeights, Drafts, Int64
from kernels.rms_norm.naive import join_norms, rms_norm
from kernels.silu_mul.naive import silu_mul
from kernels.top1.naive import top1


def draft_chain(weights: ChainWeights, start: ChainStart) -> Drafts:
    """Drafts of every sequence -> (tokens [B, D] int64, log-probabilities [B, D]).

    D is the largest of `start.depths`; what lies beyond a sequence's own depth means nothing. Keys
    and values are left by all rows and by all re-fed ones. Computed in the dtype of `start.hidden`.
    """
    last = start.row_start[1:] - 1
    row_positions = start.positions()
    own_hidden = start.hidden[start.hidden_rows()]
    _rows(
        weights,
        start,
        torch.from_numpy(start.tokens),
        own_hidden,
        row_positions,
        start.owners(),
    )
    deepest = int(start.depths.max())
    ids = torch.zeros(len(last), deepest, dtype=torch.int64)
    logprobs = torch.zeros(len(last), deepest, dtype=start.hidden.dtype)
    tokens, hidden = torch.from_numpy(start.tokens[last]), own_hidden[last]
    for depth in range(deepest):
        going = np.flatnonzero(start.depths > depth)
        positions = row_positions[last[going]] + depth
        refed = _rows(weights, start, tokens[going], hidden[going], positions, going)
        tokens[going], hidden[going] = refed[0], refed[2]
        ids[going, depth], logprobs[going, depth] = refed[0], refed[1]
    return ids.numpy(), logprobs.numpy()


def _rows(
    w: ChainWeights,
    start: ChainStart,
    tokens: Tensor,
    hidden: Tensor,
    positions: Int64,
    owners: Int64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the sequences `owners` -> (best tokens, log-probabilities, hidden after the norm)."""
    eps, wide = w.attention.eps, hidden.dtype
    joined = join_norms(w.embed[tokens].to(wide), w.norm_embedding, hidden, w.norm_hidden, eps)
    residual = joined @ w.fc.to(wide).T
    qkv = rms_norm(residual, w.input_norm, eps) @ w.qkv.to(wide).T
    batch = _batch(start, positions, owners)
    residual = residual + attention_mixer(qkv, w.attention, w.pages, batch) @ w.o.to(wide).T
    mlp = silu_mul(rms_norm(residual, w.post_norm, eps) @ w.gate_up.to(wide).T)
    after = rms_norm(residual + mlp @ w.down.to(wide).T, w.norm, eps)
    best, logprobs = top1(after @ w.head.to(wide).T)
    return best, logprobs, after


def _batch(start: ChainStart, positions: Int64, owners: Int64) -> RaggedBatch:
    """Every row as a sequence of its own, in order; the GDN fields do not matter."""
    nothing = torch.zeros(len(owners), dtype=torch.int64)
    where = torch.from_numpy(positions)
    return RaggedBatch(
        positions=where,
        row_segment=torch.arange(len(owners)),
        row_start=torch.arange(len(owners) + 1),
        starts=where,
        slots=nothing,
        committed=nothing,
        pending=nothing,
        ring_first=nothing,
        ring_rows=nothing,
        snapshots=nothing,
        first_key=torch.from_numpy(start.first_key[owners]),
        chunked=nothing,
        block_tables=torch.from_numpy(start.block_tables[owners]),
        longest=1,
        prefills=False,
    )
