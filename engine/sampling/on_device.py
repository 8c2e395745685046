"""Tokens drawn where the logits are: argmax, temperature, top-k, top-p and min-p over many rows.

Weights are summed as integers, so that a row's token depends neither on the order of the sums nor
on the rows beside it. Knows no bias, penalty or mask: such rows are drawn on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.draws import uniforms
from engine.sampling.state import SamplingRow
from engine.transfer import fetch, send

# The largest weight, 1, as an integer: 2^18 tokens of it stay below 2^63, and what is less than
# 1e-12 as likely as the best token is never drawn.
_UNIT = float(1 << 40)
# Logits drawn from at once; temporaries are eight times as large at most.
_CHUNK_ELEMENTS = 1 << 23


def draw_on_device(
    logits: Tensor, rows: Sequence[SamplingRow], on_host: Sequence[int]
) -> tuple[list[int], list[int], Tensor]:
    """One token per row of logits [n, V] float32, and the logits of the rows of `on_host`.

    Returns:
        The token of every row (without meaning for those of `on_host`), the rows without a finite
        largest logit, and the logits [len(on_host), V] on the host. One wait in all.
    """
    highest, best = logits.max(dim=-1).values, logits.argmax(dim=-1)
    kept = set(on_host)
    drawn = [i for i, row in enumerate(rows) if not row.state.greedy and i not in kept]
    if drawn:
        step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        for start in range(0, len(drawn), step):
            _draw(logits, rows, drawn[start : start + step], best)
    (picked,) = send(logits.device, np.array(on_host, np.int64))
    found = torch.stack((best, torch.isfinite(highest).long()))
    numbers, chosen = fetch(found, logits.index_select(0, picked))
    tokens, finite = numbers.tolist()
    return tokens, [i for i, fine in enumerate(finite) if not fine], chosen


def _draw(logits: Tensor, rows: Sequence[SamplingRow], drawn: list[int], best: Tensor) -> None:
    """Put the tokens of the rows `drawn` into best [n]."""
    params = [rows[i].state.params for i in drawn]
    count, width = len(drawn), logits.shape[1]
    numbers = np.empty((5, count), np.float64)
    numbers[0] = uniforms(
        np.array([p.seed for p in params], np.uint64),
        np.array([rows[i].position for i in drawn], np.uint64),
    )
    numbers[1] = [p.temperature for p in params]
    numbers[2] = [p.top_k if 0 < p.top_k < width else width for p in params]
    numbers[3] = [p.top_p for p in params]
    numbers[4] = [p.min_p for p in params]
    index, bits = send(logits.device, np.array(drawn, np.int64), numbers.view(np.int64))
    u, temperature, top_k, top_p, min_p = bits.view(torch.float64)[:, :, None]
    own = logits.index_select(0, index)
    scaled = (own - own.max(dim=-1, keepdim=True).values) / temperature.float()
    weights = (scaled.exp().double() * _UNIT).long()
    if any(rows[i].state.filtered for i in drawn):
        weights = _filtered(own, weights, top_k, top_p, min_p)
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1:]
    # u * total may round up to the total, which no entry exceeds.
    target = torch.minimum((u * total.double()).long(), total - 1)
    best.index_copy_(0, index, (cumulated <= target).sum(dim=-1))


def _filtered(
    logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The weights [n, V] without those that top_k, top_p and min_p [n, 1] drop, in this order.

    Of equal tokens the lower id is kept; the most likely one always stays.
    """
    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(-1, order)
    place = torch.arange(logits.shape[1], device=logits.device)
    ranked = ranked.where(place < top_k, 0)
    mass = ranked.cumsum(dim=-1)
    # A token stays while those before it hold less than the share; top_p 1 drops nothing.
    enough = (top_p * mass[:, -1:].double()).where(top_p < 1.0, torch.inf)
    ranked = ranked.where((mass - ranked).double() < enough, 0)
    ranked = ranked.where(ranked.double() >= min_p * ranked[:, :1].double(), 0)
    return torch.zeros_like(weights).scatter(-1, order, ranked)
