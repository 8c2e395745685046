"""The truth of the chain, in torch, out of the other operators' truths."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.naive import attention_mixer
from kernels.batch import RaggedBatch
from kernels.draft_chain.types import ChainStart, ChainWeights
from kernels.rms_norm.naive import join_norms, rms_norm
from kernels.silu_mul.naive import silu_mul
from kernels.top1.naive import top1


def draft_chain(weights: ChainWeights, start: ChainStart, depth: int) -> tuple[Tensor, Tensor]:
    """`depth` re-fed rows per sequence -> (tokens [depth, B], log-probabilities [depth, B])."""
    w, eps = weights, weights.attention.eps
    tokens, hidden, positions = start.tokens, start.hidden, start.positions
    rows = torch.arange(len(tokens))
    found = []
    for _ in range(depth):
        batch = _rows_of(start, positions, rows)
        embedded = w.embed[tokens].float()
        joined = join_norms(embedded, w.norm_embedding, hidden, w.norm_hidden, eps)
        residual = joined @ w.fc.float().T
        qkv = rms_norm(residual, w.input_norm, eps) @ w.qkv.float().T
        residual = residual + attention_mixer(qkv, w.attention, w.pages, batch) @ w.o.float().T
        mlp = silu_mul(rms_norm(residual, w.post_norm, eps) @ w.gate_up.float().T)
        hidden = rms_norm(residual + mlp @ w.down.float().T, w.norm, eps)
        tokens, logprobs = top1(hidden @ w.head.float().T)
        found.append((tokens, logprobs))
        positions = positions + 1
    return torch.stack([t for t, _ in found]), torch.stack([p for _, p in found])


def _rows_of(start: ChainStart, positions: Tensor, rows: Tensor) -> RaggedBatch:
    """One row of each sequence; the GDN fields do not matter."""
    nothing = torch.zeros_like(rows)
    return RaggedBatch(
        positions=positions,
        row_segment=rows,
        row_start=torch.arange(len(rows) + 1),
        starts=positions,
        slots=nothing,
        committed=nothing,
        pending=nothing,
        ring_first=nothing,
        ring_rows=nothing,
        snapshots=nothing,
        first_key=start.first_key,
        chunked=nothing,
        block_tables=start.block_tables,
        longest=1,
        prefills=False,
    )
