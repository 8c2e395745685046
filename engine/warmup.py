"""Runs every kind of step once before the first request, so that none waits for a compilation.

Rows go to real slots, which nobody owns yet, and their keys and values to the dummy block.
"""

from __future__ import annotations

import numpy as np

from engine.config import GRID, EngineConfig
from engine.model.hybrid import HybridModel
from engine.pools.snapshots import StateSnapshots
from engine.runner import DraftRows, PlainRows, RowPhase, Segment, Verified


def warm_up(
    model: HybridModel, config: EngineConfig, drafts: int, decode_ring: StateSnapshots
) -> None:
    """Prompts, replays, plain rows, verifies of every depth, drafts, moves and copies of states.

    Args:
        model: on fresh pools.
        config: sizes.
        drafts: unverified rows of a sequence at most, 0 without speculation.
        decode_ring: where states lie that sequences may roll back to.
    """
    steps, counted = _Steps(model, config, drafts), model.states.bytes_moved
    steps.prompts()
    for depth in steps.depths:
        steps.verify(depth)
    if steps.drafts:
        steps.draft()
    steps.set_aside(decode_ring)
    steps.move()
    model.states.warm_up()
    for slot in steps.slots:
        model.claim_slot(slot)
    model.states.bytes_moved = counted


class _Steps:
    """Segments of up to two slots, at positions that the configuration has."""

    def __init__(self, model: HybridModel, config: EngineConfig, drafts: int) -> None:
        self.slots = range(min(2, config.max_batch_size))
        self._model = model
        # Room behind the prompt for a verify and its drafts.
        self.drafts = min(drafts, (config.max_seq_len - 4) // 2)
        # numba compiles for types alone; Triton also for what rows and widths divide by.
        self._shapes_matter = model.device.type != "cpu"
        self.depths = range(1 if self._shapes_matter else max(1, self.drafts), self.drafts + 1)
        self._start = min(GRID, config.max_seq_len - 2 * self.drafts - 2)
        self._long = min(2 * GRID + 1, config.max_prefill_tokens, config.max_seq_len - 1)
        blocks = -(-config.max_seq_len // GRID)
        self._table = (model.kv.dummy_block,) * min(blocks, 3)

    def prompts(self) -> None:
        """One row, a chunk and several, alone and beside a decode; a replay; plain rows."""
        run = self._model.forward
        for rows in sorted({1, self._start}):
            run([self._segment(0, 0, rows, RowPhase.PREFILL)])
        if self._shapes_matter:
            run([self._segment(0, 0, self._long, RowPhase.PREFILL)])
            run([self._segment(slot, 0, self._start, RowPhase.PREFILL) for slot in self.slots])
            if len(self.slots) > 1:
                run([self._decode(1, 1), self._segment(0, 0, self._start, RowPhase.PREFILL)])
        run([self._segment(0, 1, min(3, self._start - 1), RowPhase.REPLAY)])
        for count in range(1, len(self.slots) + 1):
            run([self._decode(slot, 1) for slot in range(count)])

    def verify(self, depth: int) -> None:
        """A verify, alone and beside a plain row, none and all of whose drafts come true."""
        rows = depth + 1
        for emitted in (1, rows):
            self._model.forward([self._decode(0, rows)])
            self._model.accept([Verified(0, rows, emitted)])
            # What is pending is run by the next step.
            self._model.forward([self._decode(slot, 1) for slot in self.slots])
        self._model.forward([self._decode(0, rows), *(self._decode(s, 1) for s in self.slots[1:])])
        self._model.accept([Verified(0, rows, rows)])
        # Checkpoints and watchdogs run what is pending without rows of a step.
        self._model.fold([0])

    def draft(self) -> None:
        """Rows are remembered, then the head takes them over and drafts, together and alone."""
        model, start = self._model, self._start
        hidden = model.forward([self._decode(slot, 1) for slot in self.slots]).hidden
        count = len(self.slots)
        slots = np.arange(count)
        positions = np.full(count, start, np.int64)
        model.remember(PlainRows(slots, positions, None, [0] * count), hidden)
        model.remember(PlainRows(slots, positions + 1, slots, [0] * count), hidden)
        behind = start + 2
        for drafts in self.depths:
            model.draft([self._rows(0, behind, drafts)], hidden)
            behind += 1
        for slot in self.slots[1:]:
            model.claim_slot(slot)
        model.claim_slot(0)
        model.draft([self._rows(slot, start, self.drafts) for slot in self.slots], hidden)
        uneven = [self._rows(slot, start + 1, 1 + slot) for slot in self.slots]
        if self.drafts > 1:
            model.draft(uneven, hidden)
        idle = DraftRows(0, start + 2, 0, (0,), self._table, engaged=False, drafts=0)
        model.draft([idle], hidden)

    def set_aside(self, decode_ring: StateSnapshots) -> None:
        """States are copied out and back, from behind a step and from within a verify."""
        model, rows = self._model, self.drafts + 1
        for kept in (model.snapshots, decode_ring):
            if kept.places:
                model.fold([0])
                kept.save(0, 0)
                kept.load(0, 0)
        for wanted in sorted({1, *self.depths, rows}) if self.drafts else ():
            verified = Verified(0, rows, rows)
            model.forward([self._decode(0, rows)])
            model.accept([verified])
            if model.snapshots.places:
                model.rollback.export(verified, wanted, 0, model.fold)
            model.fold([0])

    def move(self) -> None:
        """The sequence of the second slot goes to the first, with every number of pending rows."""
        if len(self.slots) < 2:
            return
        ring = self._model.states.ring_slots
        for pending in (0, *self.depths) if ring > 2 else (0,):
            self._model.states.pending[1] = pending
            self._model.move_slot(1, 0)

    def _segment(self, slot: int, start: int, rows: int, phase: RowPhase) -> Segment:
        return Segment(slot, start, (0,) * rows, phase, rows, self._table, 1)

    def _decode(self, slot: int, rows: int) -> Segment:
        return Segment(slot, self._start, (0,) * rows, RowPhase.DECODE, 1, self._table, rows)

    def _rows(self, slot: int, start: int, drafts: int) -> DraftRows:
        return DraftRows(slot, start, slot, (0,), self._table, engaged=True, drafts=drafts)
