"""Requests that wait for a slot and KV blocks, in order. Knows neither slots nor blocks."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from engine.errors import InvariantError, QueueFullError
from engine.scheduler.sequence import Phase, Sequence

# How far behind the head admission looks for a request that fits; bounds the work of a step.
ADMISSION_WINDOW = 64

# How much of a new queue wait the estimate for Retry-After takes over.
_WAIT_WEIGHT = 0.2

_by_key = attrgetter("key")


class WaitingQueue:
    """A queue ordered by (priority, arrival), bounded for newcomers.

    Preempted sequences come back whatever the length is, at the place of their arrival.
    """

    __slots__ = ("_deadlines", "_items", "_limit", "_mean_wait")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._mean_wait = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def window(self) -> list[Sequence]:
        """The first requests in order that may start, as many as admission may look at."""
        return list(islice((s for s in self._items if not s.held), ADMISSION_WINDOW))

    def expect_room(self) -> None:
        """Check that a newcomer may join.

        Raises:
            QueueFullError: as many wait as are allowed to.
        """
        if len(self._items) >= self._limit:
            raise QueueFullError(
                f"{len(self._items)} requests are waiting and the limit is {self._limit}; "
                "retry later or raise --max-waiting",
                retry_after=self.retry_after(),
            )

    def retry_after(self) -> int:
        """Whole seconds, 1 to 60: about as long as the last admitted requests had to wait."""
        return max(1, min(60, round(self._mean_wait)))

    def join(self, sequence: Sequence, now: float) -> None:
        """Put a sequence at its place; its wait starts at `now`."""
        sequence.queued_at = now
        insort(self._items, sequence, key=_by_key)
        deadline = sequence.request.deadline
        # A preempted request has an open stream already, so it is never given up.
        if deadline is not None and not sequence.preemptions:
            heapq.heappush(self._deadlines, (now + deadline, sequence.key[1], sequence))

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            InvariantError: it does not wait.
        """
        index = bisect_left(self._items, sequence.key, key=_by_key)
        if index == len(self._items) or self._items[index] is not sequence:
            raise InvariantError(f"request {sequence.request_id} is not in the waiting queue")
        del self._items[index]

    def admitted(self, sequence: Sequence, now: float) -> None:
        """Take out an admitted sequence and note its wait."""
        self.leave(sequence)
        wait = now - sequence.queued_at
        sequence.queue_seconds += wait
        self._mean_wait += _WAIT_WEIGHT * (wait - self._mean_wait)

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences that were never admitted and whose deadline has passed; they stay queued."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.phase is Phase.WAITING and not sequence.preemptions:
                late.append(sequence)
        return late
