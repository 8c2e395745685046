"""Decides which waiting requests may start. Knows no rows of a step and no tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing

from engine.config import GRID
from engine.runner import Restore
from engine.scheduler.holdings import Holdings
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.reuse import PrefixReuse
from engine.scheduler.sequence import Phase, Sequence

# How often later requests may be admitted past one that does not fit yet. After that admission
# waits for it, so a large request waits at most for this many small ones beside what runs already.
MAX_BYPASSES = 16

# How many requests that do not fit as they are may be looked up in the prefix cache per step: what
# they share with running sequences might make them fit.
MAX_LOOKUPS = 4

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
        reuse: PrefixReuse | None = None,
    ) -> None:
        self._holdings = holdings
        self._reuse = reuse
        self._waiting = waiting
        self._row_budget = row_budget
        self._clock = clock

    def admit(self, prefilling: Listing[Sequence]) -> tuple[list[Sequence], list[Restore]]:
        """Start the waiting sequences that fit; both lists of sequences are sorted by key.

        The second result is for those that begin behind a cached prefix.
        """
        admitted: list[Sequence] = []
        restores: list[Restore] = []
        passed_over: list[Sequence] = []
        ahead, next_running, lookups = 0, 0, MAX_LOOKUPS
        for sequence in self._waiting.window():
            if self._holdings.slots.free == 0 or self._holdings.blocks.available == 0:
                break
            while next_running < len(prefilling) and prefilling[next_running].key < sequence.key:
                ahead += prefilling[next_running].uncomputed
                next_running += 1
            rows = sequence.rows_to_resume
            if self._row_budget - ahead < min(rows, GRID):
                break
            fits = self._fits(sequence)
            if not fits and lookups and self._reuse is not None:
                lookups -= 1
                fits = self._fits(sequence, self._shared(sequence, self._reuse))
            if fits:
                restore = self._start(sequence)
                if restore is not None:
                    restores.append(restore)
                admitted.append(sequence)
                ahead += rows - sequence.computed
                for other in passed_over:
                    other.bypassed += 1
                if any(other.bypassed >= MAX_BYPASSES for other in passed_over):
                    break
            elif sequence.bypassed >= MAX_BYPASSES:
                break
            else:
                passed_over.append(sequence)
        return admitted, restores

    def _fits(self, sequence: Sequence, shared: int = 0) -> bool:
        """Whether blocks for all known tokens plus headroom can be had, beside `shared` ones."""
        # No headroom beyond the longest output, or a request as large as the pool would never fit.
        need = min(
            sequence.blocks_to_admit() + ADMISSION_HEADROOM_BLOCKS, sequence.blocks_at_most()
        )
        return self._holdings.blocks.available >= need - shared

    def _shared(self, sequence: Sequence, reuse: PrefixReuse) -> int:
        """Blocks that it would share with running sequences; idle ones count as available."""
        holders = self._holdings.blocks.holders
        return sum(holders(node.block) > 1 for node in reuse.lookup(sequence).path)

    def _start(self, sequence: Sequence) -> Restore | None:
        """The sequence takes a slot and blocks and starts with its prompt, or behind a prefix."""
        self._waiting.admitted(sequence, self._clock())
        need = sequence.blocks_to_admit()
        sequence.phase = Phase.PREFILL
        if self._reuse is None:
            self._holdings.take(sequence, need)
            return None
        match = self._reuse.lookup(sequence)
        self._holdings.take(sequence, need, [node.block for node in match.path])
        self._reuse.take(sequence, match)
        return self._reuse.restore(sequence, match)
