"""Counters of a process that may be replaced; knows nothing of what is counted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
S = TypeVar("S")


class Rising(Generic[S, K]):
    """Totals that only rise, over processes that each count from 0.

    Args:
        counts: everything in a report that only rises. Asked for when totals are wanted, as reports
            come with every step.
        nothing: the report of a process that has counted nothing.

    Attributes:
        latest: the last report.
    """

    def __init__(self, counts: Callable[[S], Mapping[K, float]], nothing: S) -> None:
        self._counts = counts
        self._nothing = nothing
        self._base: Mapping[K, float] = counts(nothing)
        self._carried: dict[K, float] = {}
        self.latest = nothing

    def report(self, stats: S) -> None:
        """What the process has counted so far."""
        self.latest = stats

    def restart(self, baseline: S | None = None) -> None:
        """Another process counts from here; `baseline` is what it had counted before it served."""
        self._carried = self.totals()
        self.latest = self._nothing if baseline is None else baseline
        self._base = self._counts(self.latest)

    def totals(self) -> dict[K, float]:
        """Sums over all processes."""
        sums = dict(self._carried)
        for key, count in self._counts(self.latest).items():
            sums[key] = sums.get(key, 0.0) + max(0.0, count - self._base.get(key, 0.0))
        return sums
