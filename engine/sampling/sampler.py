"""Draws one token per row of logits. Knows neither scheduling nor which row belongs to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvariantError
from engine.request import TokenLogprobs
from engine.sampling.draws import inverse_cdf, uniforms
from engine.sampling.on_device import draw_on_device
from engine.sampling.shaping import (
    Row,
    TokenMask,
    filter_weights,
    logprobs_of,
    shape_logits,
    weights_of,
)
from engine.sampling.state import SamplingRow

# Logits drawn from in one vector operation: small enough that the temporaries stay in the cache and
# are not mapped anew each time (128 x 2048 on one core: 1.1 ms against 1.8 to 6 ms in one piece).
_CHUNK_ELEMENTS = 1 << 15


@dataclass(frozen=True, slots=True)
class SampledRows:
    """One entry per row.

    Attributes:
        tokens: the drawn ids; without meaning for failed rows.
        logprobs: for the rows whose request asked for them, by row.
        failed: rows without a finite largest logit, from which nothing can be drawn.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    failed: frozenset[int]


class Sampler:
    """Draws tokens; a row's result is the same, bit for bit, in any batch.

    Argmax and draws are vector operations over many rows; only rows with bias, penalties, filters
    or masks are visited one by one.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        allowed: Mapping[int, TokenMask] | None = None,
    ) -> SampledRows:
        """Draw one token per row.

        Args:
            logits: [n, vocabulary] float32 on any device.
            rows: what each row belongs to.
            allowed: row -> which tokens a grammar allows there, bool [vocabulary] or packed int32.

        Raises:
            InvariantError: logits and rows do not match.
        """
        if tuple(logits.shape) != (len(rows), self._vocab_size):
            raise InvariantError(
                f"logits of shape {tuple(logits.shape)} for {len(rows)} rows and a vocabulary of "
                f"{self._vocab_size}"
            )
        if not rows:
            return SampledRows([], {}, frozenset())
        allowed = allowed or {}
        changed = [i for i, row in enumerate(rows) if _changes_logits(row) or i in allowed]
        sampled = [i for i, row in enumerate(rows) if not row.state.greedy]
        wanted = [i for i, row in enumerate(rows) if row.state.wants_logprobs]
        if logits.device.type != "cpu":
            return self._sample_on_device(logits, rows, allowed, sorted({*changed, *wanted}))
        host = logits.detach().to("cpu", torch.float32).contiguous().numpy()
        best = host.argmax(axis=1)
        tokens: list[int] = best.tolist()
        failed = set(np.flatnonzero(~np.isfinite(host[np.arange(len(rows)), best])).tolist())
        shaped: dict[int, Row] = {}
        for index in changed:
            if index not in failed:
                shaped[index] = shape_logits(host[index], rows[index], allowed.get(index))
                tokens[index] = int(shaped[index].argmax())
                if not np.isfinite(shaped[index][tokens[index]]):
                    failed.add(index)
        _draw(host, shaped, rows, [i for i in sampled if i not in failed], tokens)
        logprobs = {
            i: logprobs_of(shaped.get(i, host[i]), tokens[i], rows[i].state.params.logprobs or 0)
            for i in wanted
            if i not in failed
        }
        return SampledRows(tokens, logprobs, frozenset(failed))

    def _sample_on_device(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        allowed: Mapping[int, TokenMask],
        on_host: list[int],
    ) -> SampledRows:
        """Draw where the logits are; only rows that a request shapes or asks about travel."""
        tokens, failed, travelled = draw_on_device(logits, rows, on_host)
        if not on_host:
            return SampledRows(tokens, {}, frozenset(failed))
        there = {i: allowed[index] for i, index in enumerate(on_host) if index in allowed}
        part = self.sample(travelled, [rows[index] for index in on_host], there)
        for i, index in enumerate(on_host):
            tokens[index] = part.tokens[i]
        logprobs = {on_host[i]: entry for i, entry in part.logprobs.items()}
        return SampledRows(
            tokens, logprobs, frozenset({*failed, *(on_host[i] for i in part.failed)})
        )


def accepted_burst(drafts: Sequence[int], targets: Sequence[int]) -> Sequence[int]:
    """The tokens that a verified step emits: targets up to and with the first unmatched one.

    Target i was drawn from row i, which follows draft i; so target i + 1 counts only when draft
    i + 1 is what target i turned out to be. Without drafts it is the one target.
    """
    kept = 1
    for draft, target in zip(drafts, targets, strict=False):
        if draft != target:
            break
        kept += 1
    return targets[:kept]


def _changes_logits(row: SamplingRow) -> bool:
    return row.state.changes_logits or row.position < row.state.min_tokens


def _draw(
    host: Row,
    shaped: Mapping[int, Row],
    rows: Sequence[SamplingRow],
    indices: list[int],
    tokens: list[int],
) -> None:
    """Draw the rows at `indices` from their shaped or plain logits into `tokens`."""
    if not indices:
        return
    params = [rows[i].state.params for i in indices]
    temperatures = np.array([p.temperature for p in params], np.float32)
    u = uniforms(
        np.array([p.seed for p in params], np.uint64),
        np.array([rows[i].position for i in indices], np.uint64),
    )
    step = max(1, _CHUNK_ELEMENTS // host.shape[1])
    for start in range(0, len(indices), step):
        part = slice(start, start + step)
        logits = host[indices[part]]
        for own, index in zip(logits, indices[part], strict=True):
            if index in shaped:
                own[:] = shaped[index]
        weights = weights_of(logits, temperatures[part])
        for number, index in enumerate(indices[part]):
            if rows[index].state.filtered:
                filter_weights(weights[number], logits[number], rows[index])
        for index, token in zip(indices[part], inverse_cdf(weights, u[part]).tolist(), strict=True):
            tokens[index] = token
