"""Decides which waiting requests may start. Knows no rows of a step and no tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing

from engine.config import GRID
from engine.scheduler.holdings import Holdings
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import Phase, Sequence

# How often later requests may be admitted past one that does not fit yet. After that admission
# waits for it, so a large request waits at most for this many small ones beside what runs already.
MAX_BYPASSES = 16

# KV blocks that must stay free at an admission, so that it does not preempt at the very next step.
ADMISSION_HEADROOM_BLOCKS = 1


class Admission:
    """Gives slots and KV blocks to waiting requests, in order, with bounded bypassing.

    A request is admitted only when the step's row budget reaches it, so that nobody holds blocks
    long before its first row.
    """

    def __init__(
        self,
        holdings: Holdings,
        waiting: WaitingQueue,
        row_budget: int,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._holdings = holdings
        self._waiting = waiting
        self._row_budget = row_budget
        self._clock = clock

    def admit(self, prefilling: Listing[Sequence]) -> list[Sequence]:
        """Start the waiting sequences that fit; both lists are sorted by key."""
        admitted: list[Sequence] = []
        passed_over: list[Sequence] = []
        ahead, next_running = 0, 0
        for sequence in self._waiting.window():
            if self._holdings.slots.free == 0 or self._holdings.blocks.free_count == 0:
                break
            while next_running < len(prefilling) and prefilling[next_running].key < sequence.key:
                ahead += prefilling[next_running].uncomputed
                next_running += 1
            rows = sequence.rows_to_resume
            if self._row_budget - ahead < min(rows, GRID):
                break
            if self._fits(sequence):
                self._start(sequence)
                admitted.append(sequence)
                ahead += rows
                for other in passed_over:
                    other.bypassed += 1
                if any(other.bypassed >= MAX_BYPASSES for other in passed_over):
                    break
            elif sequence.bypassed >= MAX_BYPASSES:
                break
            else:
                passed_over.append(sequence)
        return admitted

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the blocks for all known tokens plus headroom are free."""
        # No headroom beyond the longest output, or a request as large as the pool would never fit.
        need = min(
            sequence.blocks_to_admit() + ADMISSION_HEADROOM_BLOCKS, sequence.blocks_at_most()
        )
        return self._holdings.blocks.free_count >= need

    def _start(self, sequence: Sequence) -> None:
        """The sequence takes a slot and blocks and starts with its prompt."""
        self._waiting.admitted(sequence, self._clock())
        self._holdings.take(sequence, sequence.blocks_to_admit())
        sequence.phase = Phase.PREFILL
