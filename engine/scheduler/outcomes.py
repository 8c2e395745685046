"""Turns a step's tokens into what a sequence has and says. Knows no other sequence, no slot."""

from __future__ import annotations

from collections.abc import Sequence as Listing

from engine.errors import InvariantError
from engine.request import FinishReason, TokenDelta, TokenLogprobs
from engine.runner import RowPhase, Segment
from engine.scheduler.sequence import Phase, Sequence


def take_tokens(
    sequence: Sequence,
    segment: Segment,
    tokens: Listing[int],
    logprobs: Listing[TokenLogprobs],
) -> TokenDelta | None:
    """Move a sequence on by its rows of a step and append the tokens that they gave.

    A burst is cut at the first stop id and at the sequence's limit; nothing after the cut is
    emitted or counted. Returns what was appended, with the reason when that ended the sequence;
    None when the rows gave no token.

    Raises:
        InvariantError: so many rows cannot have given so many tokens.
    """
    if segment.phase is RowPhase.DECODE:
        if not 1 <= len(tokens) <= len(segment.token_ids):
            raise InvariantError(f"{len(tokens)} tokens from {len(segment.token_ids)} decode rows")
    else:
        if len(tokens) != segment.logit_rows:
            raise InvariantError(f"{len(tokens)} tokens from {segment.logit_rows} rows")
        _advance_prompt(sequence, segment)
    return _emit(sequence, segment, tokens, logprobs) if tokens else None


def _advance_prompt(sequence: Sequence, segment: Segment) -> None:
    sequence.computed += len(segment.token_ids)
    if sequence.uncomputed:
        return
    replays = segment.phase is RowPhase.PREFILL and len(sequence.generated) > 1
    sequence.phase = Phase.REPLAY if replays else Phase.DECODE


def _emit(
    sequence: Sequence,
    segment: Segment,
    tokens: Listing[int],
    logprobs: Listing[TokenLogprobs],
) -> TokenDelta:
    """Append a burst up to its end, and say what was appended."""
    generated = sequence.generated
    stop_ids, limit = sequence.stop_ids, sequence.limit
    finish: FinishReason | None = None
    stop_id: int | None = None
    kept = 0
    for token in tokens:
        generated.append(token)
        kept += 1
        if token in stop_ids:
            finish, stop_id = FinishReason.STOP, token
            break
        if len(generated) >= limit:
            finish = FinishReason.LENGTH
            break
    if segment.phase is RowPhase.DECODE:
        sequence.computed += kept
        if sequence.drafts:
            sequence.count_burst(len(sequence.drafts), kept - 1)
            sequence.drafts = ()
    sequence.finish_reason = finish
    return TokenDelta(
        sequence.request_id,
        tuple(tokens[:kept]),
        tuple(logprobs[:kept]),
        finish,
        stop_id,
        stats=sequence.stats() if finish is not None else None,
    )
