"""Runs the MTP head over final rows and re-feeds it to propose tokens.

While a sequence does not speculate, only its last hidden states are remembered; when it speculates
again the head catches up from those, and attends to nothing before them. Far above the dispatch cap
not even those are handed over; then a sequence begins anew. So plain decoding costs at most a copy
of one row, and a gap costs context of the drafter, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.model.batching import Int64, StepInput, step_input
from engine.model.mtp import MtpHead
from engine.pools.rollback import RowLayout
from engine.pools.shapes import LOG_ROWS
from engine.runner import DraftRows, PlainRows, Proposal, Restore, RowPhase, Segment
from engine.transfer import fetch, indices, send
from kernels.draft_chain.types import ChainStart
from kernels.ops import Linear

# Plain steps whose rows are copied together.
_MOST_WAITING = 8


@dataclass(frozen=True, slots=True)
class _FirstPass:
    """Rows of each sequence that the head has not seen: where they begin, and the token after each.

    A sequence's remembered ones come first, then those of the step.
    """

    begins: list[int]
    tokens: list[tuple[int, ...]]

    def segments(self, rows: Sequence[DraftRows]) -> list[Segment]:
        return [_segment(*each) for each in zip(rows, self.begins, self.tokens, strict=True)]


class _Cursors:
    """Where the drafter stands in each slot's sequence; positions [slots] int64, `end` exclusive.

    Attributes:
        first_key: oldest row of the head's KV that is there.
        written: rows below it are in the head's KV, re-fed ones excluded.
        logged: rows from here to `end` are in the log.
        end: rows seen so far.
    """

    def __init__(self, slots: int) -> None:
        self.first_key: Int64 = np.zeros(slots, np.int64)
        self.written: Int64 = np.zeros(slots, np.int64)
        self.logged: Int64 = np.zeros(slots, np.int64)
        self.end: Int64 = np.zeros(slots, np.int64)

    def begin(self, slot: int, position: int) -> None:
        """Nothing before `position` is known."""
        for field in (self.first_key, self.written, self.logged, self.end):
            field[slot] = position

    def move(self, src: int, dst: int) -> None:
        """The sequence in `src` goes to `dst`."""
        for field in (self.first_key, self.written, self.logged, self.end):
            field[dst] = field[src]


class Drafter:
    """The head with its log of hidden states.

    Args:
        head: the MTP head, whose layer holds views of its KV pages.
        embed: [V, H] token embeddings.
        lm_head: the target's.
        log: zeros [slots + 1, LOG_ROWS, H] for remembered hidden states, in the activations' dtype.
        dummy_block: pads block tables.
        table_width: blocks of every block table, 0 for as many as a pass needs.
    """

    def __init__(
        self,
        head: MtpHead,
        embed: Tensor,
        lm_head: Linear,
        log: Tensor,
        dummy_block: int,
        table_width: int = 0,
    ) -> None:
        self._head = head
        self._embed = embed
        self._lm_head = lm_head
        self._top1 = head.ops.top1
        self._chain = head.chain
        self._dummy_block = dummy_block
        self._table_width = table_width
        self.device = embed.device
        self.log = log
        plain = log.device.type == "cpu" and log.dtype == torch.float32
        self._host_log = log.numpy() if plain else None
        self._dtype = log.dtype
        slots = log.shape[0]
        self._log_tokens = np.zeros((slots, LOG_ROWS), np.int64)
        self._waiting: list[tuple[PlainRows, Tensor]] = []
        self._no_pending = np.zeros(slots, np.int64)
        self._cursors = _Cursors(slots)

    def claim(self, slot: int) -> None:
        """A new sequence takes the slot."""
        self._note_waiting()
        self._cursors.begin(slot, 0)

    def drafted_rows(self, slot: int) -> tuple[int, int]:
        """(first, end) positions of the slot's sequence whose rows are in the head's KV."""
        self._note_waiting()
        return int(self._cursors.first_key[slot]), int(self._cursors.written[slot])

    def begin_behind(self, restored: Restore, last_hidden: Tensor) -> None:
        """The slot's sequence begins behind a prefix; last_hidden [H] is that of its last token.

        The head's row of that token depends on the token behind it, so that it is written anew.
        """
        self._note_waiting()
        cursors, slot, last = self._cursors, restored.slot, restored.position - 1
        cursors.begin(slot, last)
        cursors.first_key[slot] = min(restored.first_drafted, last)
        cursors.end[slot] = restored.position
        self.log[slot, last % LOG_ROWS] = last_hidden
        self._log_tokens[slot, last % LOG_ROWS] = restored.next_token

    def move(self, src: int, dst: int) -> None:
        """The sequence in `src` goes to `dst`; its KV pages stay where they are."""
        self._note_waiting()
        if self._cursors.logged[src] < self._cursors.end[src]:
            self.log[dst] = self.log[src]
            self._log_tokens[dst] = self._log_tokens[src]
        self._cursors.move(src, dst)

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """Take over final rows, hidden [step rows, H]; see ModelRunner.draft."""
        self._note_waiting()
        for entry in rows:
            self._expect(entry.slot, entry.start)
            if not entry.engaged:
                self._remember_tail(entry, hidden)
        engaged = [entry for entry in rows if entry.engaged]
        proposals = iter(self._propose(engaged, hidden) if engaged else [])
        return [next(proposals) if entry.engaged else Proposal((), ()) for entry in rows]

    def remember(self, rows: PlainRows, hidden: Tensor, *, lasting: bool) -> None:
        """Take over one final row of each sequence without drafting; hidden [step rows, H].

        Where no later step writes over `hidden` (`lasting`), those of a run of plain steps are
        copied together: a copy of sixteen rows within a step takes 50 us, most of it for the call.
        """
        if self._host_log is None or rows.rows is not None or not lasting:
            self._note_waiting()
            self._note([(rows, hidden)])
            return
        if self._waiting and self._waiting[-1][0].slots is not rows.slots:
            self._note_waiting()
        self._waiting.append((rows, hidden))
        if len(self._waiting) == _MOST_WAITING:
            self._note_waiting()

    def _note_waiting(self) -> None:
        """Note the steps that wait; comes before everything that reads what is noted."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._note(waiting)

    def _note(self, steps: Sequence[tuple[PlainRows, Tensor]]) -> None:
        """Copy the rows of steps that follow each other and have the same sequences."""
        cursors, slots, positions = self._cursors, steps[0][0].slots, steps[0][0].positions
        for i in np.flatnonzero(cursors.end[slots] != positions).tolist():
            cursors.begin(int(slots[i]), int(positions[i]))
        for rows, hidden in steps:
            places = rows.positions % LOG_ROWS
            if self._host_log is not None:
                # numpy indexes four times faster than torch.
                wide = hidden.numpy()
                self._host_log[slots, places] = wide if rows.rows is None else wide[rows.rows]
            else:
                kept = () if rows.rows is None else (rows.rows,)
                slot_index, place_index, *row_index = send(self.device, slots, places, *kept)
                self.log[slot_index, place_index] = hidden[row_index[0]] if row_index else hidden
            self._log_tokens[slots, places] = rows.next_tokens
        ends = steps[-1][0].positions + 1
        cursors.end[slots] = ends
        cursors.logged[slots] = np.maximum(cursors.logged[slots], ends - LOG_ROWS)

    def _expect(self, slot: int, position: int) -> None:
        """The next row of the slot is at `position`; elsewhere than expected, it starts anew."""
        if self._cursors.end[slot] != position:
            self._cursors.begin(slot, position)

    def _remember_tail(self, entry: DraftRows, hidden: Tensor) -> None:
        """Remember the last rows of one sequence, as many as the log has room for."""
        count = min(len(entry.next_tokens), LOG_ROWS)
        end = entry.start + len(entry.next_tokens)
        places = np.arange(end - count, end) % LOG_ROWS
        last = entry.first_row + len(entry.next_tokens)
        if self._host_log is not None:
            self._host_log[entry.slot, places] = hidden.numpy()[last - count : last]
        else:
            (at,) = indices(self.device, places.tolist())
            self.log[entry.slot, at] = hidden[last - count : last]
        self._log_tokens[entry.slot, places] = entry.next_tokens[-count:]
        cursors = self._cursors
        cursors.end[entry.slot] = end
        cursors.logged[entry.slot] = max(int(cursors.logged[entry.slot]), end - LOG_ROWS)

    def _propose(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        """One pass over all final rows that the head has not seen, then a row per further draft."""
        first = self._first_pass(rows)
        if self._chain is not None:
            return self._chained(rows, first, hidden)
        inputs = self._gathered(rows, first, hidden)
        state, logits = self._run(self._step(first.segments(rows), rows), inputs)
        active = [i for i, entry in enumerate(rows) if entry.drafts]
        drafted, numbers = [], []
        depth, step = 1, None
        while active:
            best, chosen = self._top1(logits)
            drafted.append(active)
            numbers += [best, chosen]
            depth += 1
            keep = [n for n, i in enumerate(active) if rows[i].drafts >= depth]
            if len(keep) < len(active):
                (at,) = indices(self.device, keep)
                active, state, best = [active[n] for n in keep], state[at], best[at]
                step = None
            if active:
                # The next first pass writes over the keys and values of re-fed rows.
                step = self._refed([rows[i] for i in active], best, step)
                state, logits = self._run(step, state)
        return _proposals(len(rows), drafted, numbers)

    def _chained(
        self, rows: Sequence[DraftRows], first: _FirstPass, hidden: Tensor
    ) -> list[Proposal]:
        """Everything in one call, where the head is small enough."""
        assert self._chain is not None
        ids, logprobs = self._chain(self._start(rows, first, hidden))
        found = zip(rows, ids.tolist(), logprobs.tolist(), strict=True)
        return [Proposal(tuple(t[: e.drafts]), tuple(p[: e.drafts])) for e, t, p in found]

    def _start(self, rows: Sequence[DraftRows], first: _FirstPass, hidden: Tensor) -> ChainStart:
        """All numbers in one array: each further call of numpy costs 2 to 8 us within a step."""
        count, widest = len(rows), max(len(entry.block_table) for entry in rows)
        first_key = self._cursors.first_key
        row_start = list(accumulate(map(len, first.tokens), initial=0))
        first_hidden = [entry.first_row for entry in rows]
        if first.begins != [entry.start for entry in rows]:
            hidden, first_hidden = self._gathered(rows, first, hidden), row_start[:-1]
        numbers = [entry.drafts for entry in rows]
        numbers += first.begins
        numbers += first_hidden
        numbers += [first_key.item(entry.slot) for entry in rows]
        numbers += row_start
        for entry in rows:
            numbers += entry.block_table
            numbers += (self._dummy_block,) * (widest - len(entry.block_table))
        for tokens in first.tokens:
            numbers += tokens
        packed = np.fromiter(numbers, np.int64, len(numbers))
        tables = 5 * count + 1
        rest = tables + count * widest
        return ChainStart(
            tokens=packed[rest:],
            hidden=hidden,
            row_start=packed[4 * count : tables],
            begins=packed[count : 2 * count],
            first_hidden=packed[2 * count : 3 * count],
            block_tables=packed[tables:rest].reshape(count, widest),
            first_key=packed[3 * count : 4 * count],
            depths=packed[:count],
        )

    def _first_pass(self, rows: Sequence[DraftRows]) -> _FirstPass:
        """Remembered rows and new ones of every sequence, which the head has seen from now on."""
        cursors = self._cursors
        tokens: list[tuple[int, ...]] = []
        begins: list[int] = []
        for entry in rows:
            slot, own = entry.slot, entry.next_tokens
            written, logged = cursors.written.item(slot), cursors.logged.item(slot)
            if written < logged:
                cursors.first_key[slot] = logged
            begin = max(written, logged)
            if begin < entry.start:
                places = np.arange(begin, entry.start) % LOG_ROWS
                own = (*self._log_tokens[slot, places].tolist(), *own)
            begins.append(begin)
            tokens.append(own)
            for field in (cursors.end, cursors.written, cursors.logged):
                field[slot] = entry.start + len(entry.next_tokens)
        return _FirstPass(begins, tokens)

    def _gathered(self, rows: Sequence[DraftRows], first: _FirstPass, hidden: Tensor) -> Tensor:
        """[all rows of the first pass, H] in the activations' dtype; hidden [step rows, H]."""
        fresh_at: list[int] = []
        fresh_from: list[int] = []
        logged_at: list[int] = []
        logged_from: list[int] = []
        total = 0
        for entry, begin in zip(rows, first.begins, strict=True):
            logged, fresh = entry.start - begin, len(entry.next_tokens)
            logged_at += range(total, total + logged)
            logged_from += (entry.slot * LOG_ROWS + p % LOG_ROWS for p in range(begin, entry.start))
            fresh_at += range(total + logged, total + logged + fresh)
            fresh_from += range(entry.first_row, entry.first_row + fresh)
            total += logged + fresh
        if not logged_at:
            (picked,) = indices(self.device, fresh_from)
            return hidden[picked].to(self._dtype)
        at = indices(self.device, fresh_from, fresh_at, logged_from, logged_at)
        inputs = torch.empty((total, hidden.shape[1]), dtype=self._dtype, device=self.device)
        inputs[at[1]] = hidden[at[0]].to(self._dtype)
        inputs[at[3]] = self.log.view(-1, hidden.shape[1])[at[2]]
        return inputs

    def _step(self, segments: Sequence[Segment], rows: Sequence[DraftRows]) -> StepInput:
        layouts = [RowLayout(len(s.token_ids)) for s in segments]
        first_key = self._cursors.first_key[[entry.slot for entry in rows]]
        return step_input(
            segments,
            layouts,
            self._no_pending,
            self._dummy_block,
            self.device,
            first_key,
            self._table_width,
        )

    def _refed(
        self, rows: Sequence[DraftRows], tokens: Tensor, before: StepInput | None
    ) -> StepInput:
        """One row of each sequence behind its last; `before` is the pass of the same sequences."""
        if before is not None:
            batch = before.batch
            batch = replace(batch, positions=batch.positions + 1, starts=batch.starts + 1)
            return replace(before, token_ids=tokens, batch=batch)
        ends = self._cursors.end[[entry.slot for entry in rows]].tolist()
        segments = [_segment(e, end, (0,)) for e, end in zip(rows, ends, strict=True)]
        return replace(self._step(segments, rows), token_ids=tokens)

    def _run(self, step: StepInput, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden [n, H] after the head's norm, logits [n, V]) of the wanted rows."""
        embedded = torch.embedding(self._embed, step.token_ids).to(self._dtype)
        out = self._head(embedded, inputs, step.batch, step.logit_rows)
        return out, self._lm_head(out).float() if len(out) else out


def _proposals(count: int, drafted: list[list[int]], numbers: list[Tensor]) -> list[Proposal]:
    """Of `count` entries; numbers: ids and log-probabilities of each pass over `drafted` entries.

    Only here does the host wait for the drafts, once for all passes.
    """
    tokens: list[list[int]] = [[] for _ in range(count)]
    logprobs: list[list[float]] = [[] for _ in range(count)]
    host = [tensor.tolist() for tensor in fetch(*numbers)] if numbers else []
    for entries, ids, chances in zip(drafted, host[::2], host[1::2], strict=True):
        for i, token, logprob in zip(entries, ids, chances, strict=True):
            tokens[i].append(token)
            logprobs[i].append(logprob)
    return [Proposal(tuple(t), tuple(p)) for t, p in zip(tokens, logprobs, strict=True)]


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
