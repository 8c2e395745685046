"""How many CPU threads a pass uses: one or all, whichever was faster of late for as many rows.

A second thread halves a wide pass on a calm machine. Beside a busy process it makes it ten times
longer, since OpenMP's threads spin while the other one waits for a core. The bits are the same, so
that the choice may follow the clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Passes between two looks at the other choice: doubled while looks confirm the one in use.
FIRST_LOOK, LAST_LOOK = 16, 1024
# Passes of one look; the first of them may pay for waking or parking the other thread.
LOOK = 3
# How much faster the other choice must be to be taken.
GAIN = 0.95
# A pass that takes this many times the other choice's time ends the choice at once.
ALARM = 2.5
# Passes of as many rows begin with all threads: prompts are over before a look could tell.
WIDE = 32
_KEPT = 7


@dataclass(slots=True)
class _Bucket:
    """Passes of about as many rows: the choice in use and recent seconds by threads."""

    threads: int
    seconds: dict[int, deque[float]] = field(default_factory=dict)
    period: int = FIRST_LOOK
    until_look: int = FIRST_LOOK
    looking: int = 0
    explored: int = 0

    def typical(self, threads: int) -> float | None:
        recent = self.seconds.get(threads)
        return median(recent) if recent else None

    def add(self, threads: int, seconds: float) -> None:
        self.seconds.setdefault(threads, deque(maxlen=_KEPT)).append(seconds)


class ThreadChooser:
    """Chooses between 1 and `most` threads by kind and rows of a pass.

    Ask `choose` before a pass and tell `observe` after it, in turn.
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._buckets: dict[tuple[str, int], _Bucket] = {}
        self._exploring = False

    def explore(self, on: bool) -> None:
        """While it is on, passes alternate between both choices; then each bucket takes the better.

        For a start on which nothing else runs, so that what is timed next is timed at its best.
        """
        self._exploring = on
        if on:
            return
        for bucket in self._buckets.values():
            found = {threads: min(times) for threads, times in bucket.seconds.items() if times}
            if len(found) > 1:
                bucket.threads = min(found, key=lambda threads: found[threads])

    def choose(self, kind: str, rows: int) -> int:
        """Threads for a pass of `rows` rows; `kind` tells passes of other shapes apart."""
        if self._most == 1:
            return 1
        bucket = self._bucket(kind, rows)
        if self._exploring:
            return 1 if bucket.explored % 2 else self._most
        if bucket.looking:
            return self._other(bucket.threads)
        return bucket.threads

    def observe(self, kind: str, rows: int, threads: int, seconds: float) -> None:
        """Learn that a pass on `threads` threads took `seconds`."""
        if self._most == 1:
            return
        bucket = self._bucket(kind, rows)
        if self._exploring:
            bucket.explored += 1
            bucket.add(threads, seconds)
            return
        if bucket.looking:
            self._look(bucket, threads, seconds)
            return
        bucket.add(threads, seconds)
        other = self._other(threads)
        known = bucket.typical(other)
        if known is not None and seconds > ALARM * known:
            # Somebody took a core away; come back to look later.
            self._switch(bucket, other)
            return
        bucket.until_look -= 1
        if bucket.until_look <= 0:
            bucket.looking = LOOK
            bucket.seconds.pop(other, None)

    def _look(self, bucket: _Bucket, threads: int, seconds: float) -> None:
        if bucket.looking < LOOK:
            bucket.add(threads, seconds)
        bucket.looking -= 1
        now = bucket.typical(bucket.threads)
        if now is not None and seconds > ALARM * now:
            bucket.looking = 0
            bucket.add(threads, seconds)
        if bucket.looking:
            return
        found = bucket.typical(threads)
        if found is not None and now is not None and found < GAIN * now:
            self._switch(bucket, threads)
        else:
            bucket.period = min(2 * bucket.period, LAST_LOOK)
            bucket.until_look = bucket.period

    def _switch(self, bucket: _Bucket, threads: int) -> None:
        bucket.threads = threads
        bucket.period = bucket.until_look = FIRST_LOOK

    def _bucket(self, kind: str, rows: int) -> _Bucket:
        key = (kind, rows.bit_length())
        found = self._buckets.get(key)
        if found is None:
            # For few rows one thread is never far off; the first look tells.
            found = self._buckets[key] = _Bucket(threads=1 if rows < WIDE else self._most)
        return found

    def _other(self, threads: int) -> int:
        return self._most if threads == 1 else 1
