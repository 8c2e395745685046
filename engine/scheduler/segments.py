"""Turns sequences into the rows of one step. Reads sequences only, and takes nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing

from engine.config import GRID
from engine.runner import Restore, RowPhase, Save, Segment
from engine.sampling.state import SamplingRow
from engine.scheduler.plan import StepKind, StepPlan
from engine.scheduler.sequence import Phase, Sequence

# (sequence, computed behind its next rows) -> states to set aside.
SetAside = Callable[[Sequence, int], tuple[Save, ...]]


def build_plan(
    decoding: Listing[Sequence],
    prefilling: Listing[Sequence],
    *,
    budget: int,
    claims: tuple[int, ...],
    restores: tuple[Restore, ...] = (),
    set_aside: SetAside | None = None,
) -> StepPlan:
    """The next step: every decode, then prompt and replay rows in order up to `budget` rows.

    `set_aside` is asked for every prompt which states its next rows leave behind.
    """
    segments: list[Segment] = []
    sequences = list(decoding)
    sampling_rows: list[SamplingRow] = []
    has_drafts = False
    for sequence in decoding:
        segments.append(_decode_segment(sequence))
        position = len(sequence.generated)
        sampling_rows.append(SamplingRow(sequence.sampling, position))
        drafts = sequence.drafts
        if drafts:
            has_drafts = True
            sampling_rows += [
                SamplingRow(sequence.sampling, position + i, drafts[:i])
                for i in range(1, len(drafts) + 1)
            ]
    for sequence in prefilling:
        rows = _chunk(sequence, budget)
        if rows == 0:
            continue
        budget -= rows
        segment = _prompt_segment(sequence, rows, set_aside)
        sequences.append(sequence)
        segments.append(segment)
        if segment.logit_rows:
            sampling_rows.append(SamplingRow(sequence.sampling, 0))
    return StepPlan(
        segments=tuple(segments),
        sequences=tuple(sequences),
        sampling_rows=tuple(sampling_rows),
        claims=claims,
        kind=_kind(len(decoding), len(segments) - len(decoding), has_drafts),
        rows=sum(len(segment.token_ids) for segment in segments),
        restores=restores,
    )


def _decode_segment(sequence: Sequence) -> Segment:
    """Row 0 is the last emitted token, drafts follow; every row needs logits."""
    slot = sequence.slot
    assert slot is not None
    tokens = (sequence.generated[-1], *sequence.drafts)
    return Segment(
        slot, sequence.computed, tokens, RowPhase.DECODE, 1, sequence.block_table, len(tokens)
    )


def _prompt_segment(sequence: Sequence, rows: int, set_aside: SetAside | None) -> Segment:
    """The next `rows` prompt or replay rows; only a fresh prompt's last row needs logits."""
    slot = sequence.slot
    assert slot is not None
    start, end = sequence.computed, sequence.computed + rows
    samples = end == len(sequence.prompt) and not sequence.generated
    prefills = sequence.phase is Phase.PREFILL
    return Segment(
        slot=slot,
        start=start,
        token_ids=sequence.tokens_between(start, end),
        phase=RowPhase.PREFILL if prefills else RowPhase.REPLAY,
        committed=rows,
        block_table=sequence.block_table,
        logit_rows=1 if samples else 0,
        next_token=None if samples else sequence.token_at(end),
        saves=set_aside(sequence, end) if prefills and set_aside is not None else (),
    )


def _chunk(sequence: Sequence, budget: int) -> int:
    """Prompt or replay rows for this step; prompt chunks end on the grid or at the prompt's end.

    Where a checkpoint is due a replay ends too: only the state behind its last row is ever stored.
    """
    rows = min(sequence.uncomputed, budget)
    if sequence.phase is not Phase.PREFILL:
        return min(rows, sequence.checkpoint_at - sequence.computed)
    # `computed` is on the grid while a prompt is not finished.
    return rows if rows == sequence.uncomputed else rows // GRID * GRID


def _kind(decodes: int, prompts: int, has_drafts: bool) -> StepKind:
    if has_drafts:
        return StepKind.VERIFY
    if decodes and prompts:
        return StepKind.MIXED
    return StepKind.PREFILL if prompts else StepKind.DECODE
