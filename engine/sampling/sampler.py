"""Draws one token per row of logits. Knows neither scheduling nor which row belongs to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import InvariantError
from engine.request import TokenLogprobs
from engine.sampling.draws import inverse_cdf, uniforms
from engine.sampling.shaping import (
    Row,
    TokenMask,
    filter_weights,
    logprobs_of,
    shape_logits,
    weights_of,
)
from engine.sampling.state import DrawKind, SamplingRow

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
    """Draws tokens on the host; a row's result is the same, bit for bit, in any batch.

    Plain greedy rows and plain temperature rows take one vector operation each; rows with bias,
    penalties, filters or masks are shaped one by one.
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
        kinds = [_kind_at(row) for row in rows]
        for index in allowed:
            kinds[index] = DrawKind.SHAPED
        wants_logprobs = [i for i, row in enumerate(rows) if row.state.wants_logprobs]
        all_greedy = kinds.count(DrawKind.GREEDY) == len(rows)
        if all_greedy and not wants_logprobs and logits.device.type != "cpu":
            return _argmax_on_device(logits)
        host = logits.detach().to("cpu", torch.float32).contiguous().numpy()
        best = host.argmax(axis=1)
        highest = host[np.arange(len(rows)), best]
        tokens: list[int] = best.tolist()
        failed = set(np.flatnonzero(~np.isfinite(highest)).tolist())
        if not all_greedy:
            _draw_plain(host, rows, kinds, failed, tokens)
        shaped = _draw_shaped(host, rows, kinds, allowed, failed, tokens)
        logprobs = {
            i: logprobs_of(shaped.get(i, host[i]), tokens[i], rows[i].state.params.logprobs or 0)
            for i in wants_logprobs
            if i not in failed
        }
        return SampledRows(tokens, logprobs, frozenset(failed))


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


def _kind_at(row: SamplingRow) -> DrawKind:
    state = row.state
    return DrawKind.SHAPED if row.position < state.min_tokens else state.kind


def _argmax_on_device(logits: Tensor) -> SampledRows:
    """All rows greedy: only n ids travel to the host. Equal logits go to the lowest id."""
    highest, best = logits.max(dim=-1).values, logits.argmax(dim=-1)
    failed = torch.nonzero(~torch.isfinite(highest)).flatten().tolist()
    return SampledRows(best.tolist(), {}, frozenset(failed))


def _draw_plain(
    host: Row,
    rows: Sequence[SamplingRow],
    kinds: list[DrawKind],
    failed: set[int],
    tokens: list[int],
) -> None:
    """Draw all plain temperature rows in vector operations."""
    plain = [i for i, k in enumerate(kinds) if k is DrawKind.TEMPERATURE and i not in failed]
    if not plain:
        return
    temperatures, u = _temperatures(rows, plain), _uniforms(rows, plain)
    step = max(1, _CHUNK_ELEMENTS // host.shape[1])
    for start in range(0, len(plain), step):
        part = slice(start, start + step)
        weights = weights_of(host[plain[part]], temperatures[part])
        for index, token in zip(plain[part], inverse_cdf(weights, u[part]).tolist(), strict=True):
            tokens[index] = token


def _draw_shaped(
    host: Row,
    rows: Sequence[SamplingRow],
    kinds: list[DrawKind],
    allowed: Mapping[int, TokenMask],
    failed: set[int],
    tokens: list[int],
) -> dict[int, Row]:
    """Shape and filter rows one by one, then draw; returns their shaped logits."""
    shaped: dict[int, Row] = {}
    sampled: list[int] = []
    for index, kind in enumerate(kinds):
        if kind is not DrawKind.SHAPED or index in failed:
            continue
        row = rows[index]
        logits = shape_logits(host[index], row, allowed.get(index))
        shaped[index] = logits
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            failed.add(index)
        elif row.state.greedy:
            tokens[index] = best
        else:
            sampled.append(index)
    if sampled:
        logits = np.stack([shaped[i] for i in sampled])
        weights = weights_of(logits, _temperatures(rows, sampled))
        for index, own in zip(sampled, weights, strict=True):
            filter_weights(own, shaped[index], rows[index])
        drawn = inverse_cdf(weights, _uniforms(rows, sampled)).tolist()
        for index, token in zip(sampled, drawn, strict=True):
            tokens[index] = token
    return shaped


def _temperatures(rows: Sequence[SamplingRow], indices: list[int]) -> Row:
    return np.array([rows[i].state.params.temperature for i in indices], np.float32)


def _uniforms(rows: Sequence[SamplingRow], indices: list[int]) -> npt.NDArray[np.float64]:
    return uniforms(
        np.array([rows[i].state.params.seed for i in indices], np.uint64),
        np.array([rows[i].position for i in indices], np.uint64),
    )
