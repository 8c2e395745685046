"""The truth, in torch."""

from __future__ import annotations

from torch import Tensor


def top1(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, V] float32 -> (ids [n] int64, log-probabilities [n] float32); ties: lowest id."""
    best = logits.argmax(dim=-1)
    top = logits.gather(-1, best[:, None])[:, 0]
    return best, top - logits.logsumexp(dim=-1)
