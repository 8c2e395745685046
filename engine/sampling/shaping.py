"""Changes to one row of logits or weights: bias, penalties, masks, top-k, top-p, min-p.

Functions of one row and its sequence's tokens; knows nothing of draws or of other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import TokenLogprobs
from engine.sampling.state import SamplingRow

Row = npt.NDArray[np.float32]
TokenMask = npt.NDArray[np.bool_] | npt.NDArray[np.int32]

_NEVER = np.float32(-np.inf)


def shape_logits(logits: Row, row: SamplingRow, allowed: TokenMask | None) -> Row:
    """A changed copy of logits [vocabulary]: bias, then penalties, then masks, then a ban.

    Bias and presence/frequency penalties are OpenAI's: logit + bias - presence * [count > 0] -
    frequency * count, counts over generated tokens. The repetition penalty (CTRL, Keskar et al.
    2019) divides positive and multiplies negative logits of tokens in prompt or output.
    """
    logits = logits.copy()
    state = row.state
    params = state.params
    for token, bias in params.logit_bias:
        logits[token] += bias
    if state.penalised:
        counts = state.counts(logits.size, row.drafts)
        if params.repetition_penalty != 1.0:
            seen = (counts > 0) | state.in_prompt(logits.size)
            penalty = np.float32(params.repetition_penalty)
            hit = logits[seen]
            logits[seen] = np.where(hit > 0, hit / penalty, hit * penalty)
        logits -= np.float32(params.frequency_penalty) * counts
        logits -= np.float32(params.presence_penalty) * (counts > 0)
    if allowed is not None:
        logits[~unpack_mask(allowed, logits.size)] = _NEVER
    if row.position < state.banned_until:
        _ban(logits, state.banned)
    if row.position < state.min_tokens:
        ends = [token for token in state.stop_ids if token < logits.size]
        kept = logits[ends]
        logits[ends] = _NEVER
        if not np.isfinite(logits.max()):
            # A grammar that is complete allows nothing but an end, and it wins over min_tokens.
            logits[ends] = kept
    return logits


def _ban(logits: Row, tokens: Sequence[int]) -> None:
    """Take `tokens` away, unless a grammar leaves nothing else."""
    ids = list(tokens)
    kept = logits[ids]
    logits[ids] = _NEVER
    if not np.isfinite(logits.max()):
        logits[ids] = kept


def unpack_mask(mask: TokenMask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool [vocab_size] of a mask that is bool or packed: bit i % 32 of int32 word i // 32."""
    if mask.dtype == np.bool_:
        return mask[:vocab_size].astype(np.bool_, copy=False)
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)


def weights_of(logits: Row, temperatures: npt.NDArray[np.float32]) -> Row:
    """exp((logits - max) / temperature), [n, vocabulary] by [n]; the largest weight is 1.

    The maximum goes first, so what overflows is at the far end and becomes weight zero.
    """
    with np.errstate(over="ignore"):
        scaled: Row = logits - logits.max(axis=1, keepdims=True)
        scaled /= temperatures[:, None]
    np.exp(scaled, out=scaled)
    return scaled


def filter_weights(weights: Row, logits: Row, row: SamplingRow) -> None:
    """Set the weights [vocabulary] that top_k, top_p and min_p drop to zero, in this order.

    Equal tokens are told apart by id, the lower one is kept. The most likely token always stays.
    """
    params = row.state.params
    if 0 < params.top_k < weights.size:
        _keep_top_k(weights, logits, params.top_k)
    if params.top_p < 1.0:
        _keep_top_p(weights, params.top_p)
    if params.min_p > 0.0:
        weights[weights < np.float32(params.min_p) * weights.max()] = 0.0


def _keep_top_k(weights: Row, logits: Row, k: int) -> None:
    smallest = np.partition(logits, logits.size - k)[logits.size - k]
    keep = logits > smallest
    ties = (logits == smallest).nonzero()[0]
    keep[ties[: k - np.count_nonzero(keep)]] = True
    weights[~keep] = 0.0


def _keep_top_p(weights: Row, top_p: float) -> None:
    total = weights.sum(dtype=np.float64)
    # All weights below this share sum to less than the 1 - p that may be dropped, so that only the
    # few above it need sorting.
    share = (1.0 - top_p) * total / weights.size
    candidates = (weights >= share).nonzero()[0]
    values = weights[candidates]
    order = np.argsort(-values, kind="stable")
    mass = values[order].cumsum(dtype=np.float64)
    kept = order[: int(mass.searchsorted(top_p * total)) + 1]
    weights.fill(0.0)
    weights[candidates[kept]] = values[kept]


def logprobs_of(logits: Row, token: int, count: int) -> TokenLogprobs:
    """Log-softmax of one row in float64: the chosen token's, and the `count` best with their ids.

    Equal tokens come by rising id; tokens that a mask forbids are never listed.
    """
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        count = min(count, exact.size)
        smallest = np.partition(logits, logits.size - count)[logits.size - count]
        best = (logits >= smallest).nonzero()[0]
        best = best[np.argsort(-logits[best], kind="stable")][:count]
        top = tuple((int(i), float(exact[i])) for i in best if np.isfinite(exact[i]))
    return TokenLogprobs(float(exact[token]), top)
