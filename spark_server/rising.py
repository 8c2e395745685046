"""Counters of a process that may be replaced; knows nothing of what is counted."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Rising(Generic[K]):
    """Totals that only rise, over processes that each count from 0."""

    def __init__(self) -> None:
        self._latest: Mapping[K, float] = {}
        self._base: Mapping[K, float] = {}
        self._carried: dict[K, float] = {}

    def report(self, counts: Mapping[K, float]) -> None:
        """What the process has counted so far."""
        self._latest = counts

    def restart(self, baseline: Mapping[K, float] | None = None) -> None:
        """Another process counts from here; `baseline` is what it had counted before it served."""
        self._carried = self.totals()
        self._latest = self._base = baseline or {}

    def totals(self) -> dict[K, float]:
        """Sums over all processes."""
        sums = dict(self._carried)
        for key, count in self._latest.items():
            sums[key] = sums.get(key, 0.0) + max(0.0, count - self._base.get(key, 0.0))
        return sums
