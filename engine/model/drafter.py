"""Runs the MTP head over final rows and re-feeds it to propose tokens.

While a sequence does not speculate, only its last hidden states are remembered; when it speculates
again the head catches up from those, and attends to nothing before them. So plain decoding costs a
copy of one row, and a gap costs context of the drafter, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.batching import StepInput, step_input
from engine.model.mtp import MtpHead
from engine.pools.rollback import RowLayout
from engine.pools.shapes import LOG_ROWS
from engine.runner import DraftRows, Proposal, RowPhase, Segment
from kernels.ops import Linear


@dataclass(slots=True)
class _Cursor:
    """Where the drafter stands in one slot's sequence; all positions, `end` exclusive.

    Attributes:
        first_key: oldest row of the head's KV that is there.
        written: rows below it are in the head's KV, re-fed ones excluded.
        logged: rows from here to `end` are in the log.
        end: rows seen so far.
    """

    first_key: int = 0
    written: int = 0
    logged: int = 0
    end: int = 0


class Drafter:
    """The head with its log of hidden states.

    Args:
        head: the MTP head, whose layer holds views of its KV pages.
        embed: [V, H] token embeddings.
        lm_head: the target's.
        log: zeros [slots + 1, LOG_ROWS, H] for remembered hidden states, in the activations' dtype.
        dummy_block: pads block tables.
    """

    def __init__(
        self,
        head: MtpHead,
        embed: Tensor,
        lm_head: Linear,
        log: Tensor,
        dummy_block: int,
    ) -> None:
        self._head = head
        self._embed = embed
        self._lm_head = lm_head
        self._top1 = head.ops.top1
        self._dummy_block = dummy_block
        self.device = embed.device
        self.log = log
        self._dtype = log.dtype
        slots = log.shape[0]
        self._log_tokens = np.zeros((slots, LOG_ROWS), np.int64)
        self._no_pending = np.zeros(slots, np.int64)
        self._cursors = [_Cursor() for _ in range(slots)]

    def claim(self, slot: int) -> None:
        """A new sequence takes the slot."""
        self._cursors[slot] = _Cursor()

    def move(self, src: int, dst: int) -> None:
        """The sequence in `src` goes to `dst`; its KV pages stay where they are."""
        self.log[dst] = self.log[src]
        self._log_tokens[dst] = self._log_tokens[src]
        self._cursors[dst] = self._cursors[src]
        self._cursors[src] = _Cursor()

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """Take over final rows, hidden [step rows, H]; see ModelRunner.draft."""
        for entry in rows:
            cursor = self._cursors[entry.slot]
            if cursor.end != entry.start:
                # The sequence resumed elsewhere: what came before is not in this drafter.
                self._cursors[entry.slot] = _Cursor(*(entry.start,) * 4)
        self._remember([entry for entry in rows if not entry.engaged], hidden)
        engaged = [entry for entry in rows if entry.engaged]
        proposals = iter(self._propose(engaged, hidden) if engaged else [])
        return [next(proposals) if entry.engaged else Proposal((), ()) for entry in rows]

    def _remember(self, rows: Sequence[DraftRows], hidden: Tensor) -> None:
        slots: list[int] = []
        places: list[int] = []
        sources: list[int] = []
        for entry in rows:
            cursor = self._cursors[entry.slot]
            count = len(entry.next_tokens)
            for i in range(max(0, count - LOG_ROWS), count):
                place = (entry.start + i) % LOG_ROWS
                slots.append(entry.slot)
                places.append(place)
                sources.append(entry.first_row + i)
                self._log_tokens[entry.slot, place] = entry.next_tokens[i]
            cursor.end = entry.start + count
            cursor.logged = max(cursor.logged, cursor.end - LOG_ROWS)
        if slots:
            self.log[slots, places] = hidden[sources]

    def _propose(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """One pass over all final rows that the head has not seen, then a row per further draft."""
        segments, inputs = self._first_pass(rows, hidden)
        state, logits = self._run(segments, inputs, rows)
        ends = np.cumsum([len(s.token_ids) for s in segments]) - 1
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        active = [i for i, entry in enumerate(rows) if entry.drafts]
        last = state[ends[active]] if active else state[:0]
        depth = 1
        while active:
            best, chosen = self._top1(logits)
            for i, token, logprob in zip(active, best.tolist(), chosen.tolist(), strict=True):
                tokens[i].append(token)
                logprobs[i].append(logprob)
            depth += 1
            keep = [n for n, i in enumerate(active) if rows[i].drafts >= depth]
            active = [active[n] for n in keep]
            if active:
                refed = [
                    _row(rows[i], self._cursors[rows[i].slot].end + depth - 2, tokens[i][-1])
                    for i in active
                ]
                last, logits = self._run(refed, last[keep], [rows[i] for i in active])
        return [Proposal(tuple(t), tuple(p)) for t, p in zip(tokens, logprobs, strict=True)]

    def _first_pass(
        self, rows: Sequence[DraftRows], hidden: Tensor
    ) -> tuple[list[Segment], Tensor]:
        """Remembered rows and new ones of every sequence, with their hidden states [n, H]."""
        segments: list[Segment] = []
        fresh_at: list[int] = []
        fresh_from: list[int] = []
        logged_at: list[int] = []
        logged_from: list[int] = []
        total = 0
        for entry in rows:
            cursor = self._cursors[entry.slot]
            if cursor.written < cursor.logged:
                cursor.first_key = cursor.logged
            begin = max(cursor.written, cursor.logged)
            places = [p % LOG_ROWS for p in range(begin, cursor.end)]
            logged_at += range(total, total + len(places))
            logged_from += (entry.slot * LOG_ROWS + place for place in places)
            total += len(places)
            fresh_at += range(total, total + len(entry.next_tokens))
            fresh_from += range(entry.first_row, entry.first_row + len(entry.next_tokens))
            total += len(entry.next_tokens)
            backlog = tuple(int(t) for t in self._log_tokens[entry.slot, places])
            segments.append(_segment(entry, begin, backlog + entry.next_tokens))
            cursor.end = entry.start + len(entry.next_tokens)
            cursor.written = cursor.logged = cursor.end
        inputs = torch.empty((total, hidden.shape[1]), dtype=self._dtype, device=self.device)
        inputs[fresh_at] = hidden[fresh_from]
        if logged_at:
            inputs[logged_at] = self.log.view(-1, hidden.shape[1])[logged_from]
        return segments, inputs

    def _run(
        self, segments: Sequence[Segment], inputs: Tensor, rows: Sequence[DraftRows]
    ) -> tuple[Tensor, Tensor]:
        """(hidden [rows, H] after the head's norm, logits of the wanted rows)."""
        layouts = [RowLayout(len(s.token_ids)) for s in segments]
        first_key = np.array([self._cursors[e.slot].first_key for e in rows], np.int64)
        step: StepInput = step_input(
            segments, layouts, self._no_pending, self._dummy_block, self.device, first_key
        )
        out = self._head(self._embed[step.token_ids].to(self._dtype), inputs, step.batch)
        wanted = step.logit_rows
        return out, self._lm_head(out[wanted]).float() if len(wanted) else out[:0]


def _segment(entry: DraftRows, start: int, tokens: tuple[int, ...]) -> Segment:
    return Segment(
        slot=entry.slot,
        start=start,
        token_ids=tokens,
        phase=RowPhase.DECODE,
        committed=len(tokens),
        block_table=entry.block_table,
        logit_rows=1 if entry.drafts else 0,
    )


def _row(entry: DraftRows, position: int, token: int) -> Segment:
    """A re-fed row; the next first pass writes over it."""
    return _segment(entry, position, (token,))
