"""The rung for widths 9 to 16, chosen from accepted drafts. Knows no clock: times come in.

Verify outcomes are counted per batch width; a full bucket is a flush, and flushes move the
controller. It only ever lifts the ladder, and only from one draft to two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.reserve.ladder import DEFAULT_LADDER, Ladder, mtp_ladder_drafts

FLUSH_VERIFIES = 128
# A bucket that filled more slowly than this says nothing of the traffic of now.
STALE_SECONDS = 5.0
WIDTHS = range(9, 17)
_DEEP = 2
# Two drafts pay when a step yields this much more than with one, and until it yields less than the
# second; what lies between keeps the rung from flapping.
DEEPEN_RATIO = 1.32
SHALLOW_RATIO = 1.30
_FAST, _SLOW = 0.5, 0.15
PROBE_RISE = 0.08
PROBE_FLUSHES = 2048


def token_ratio(p1: float, p2_cond: float) -> float:
    """Tokens per step at two drafts over those at one: (1 + p1 + p1·p2) / (1 + p1).

    Args:
        p1: chance that the first draft is accepted.
        p2_cond: chance of the second once the first is accepted.
    """
    if not math.isfinite(p1) or p1 <= 0:
        return 1.0
    return 1.0 + p1 * p2_cond / (1.0 + p1)


@dataclass(frozen=True, slots=True)
class Flush:
    """What 128 verifies at one width came to.

    Attributes:
        width: sequences of the batch; for the bucket of all wider ones, the cap + 1.
        p1: share whose first draft was accepted.
        mean_na: mean of accepted drafts.
        depth: drafts that at least half of the verifies carried.
        p2_cond: share of the second drafts accepted among those whose first one was, from verifies
            of two drafts or more; None when `depth` is 1.
        seconds: from the first verify to the last.
    """

    width: int
    p1: float
    mean_na: float
    depth: int
    p2_cond: float | None
    seconds: float

    @property
    def stale(self) -> bool:
        """To be logged, and not to be learnt from."""
        return self.seconds > STALE_SECONDS


@dataclass(slots=True)
class _Bucket:
    started: float
    verifies: int = 0
    accepted: int = 0
    first: int = 0
    deep: int = 0
    deep_first: int = 0
    deep_second: int = 0
    depths: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: int) -> None:
        self.verifies += 1
        self.accepted += accepted
        self.first += accepted >= 1
        self.depths.append(drafts)
        if drafts >= _DEEP:
            self.deep += 1
            self.deep_first += accepted >= 1
            self.deep_second += accepted >= _DEEP

    def flush(self, width: int, now: float) -> Flush:
        depth = sorted(self.depths, reverse=True)[(self.verifies - 1) // 2]
        p2_cond = None
        if depth >= _DEEP:
            # Nothing accepted at all is an observation too: the second would not have been.
            p2_cond = self.deep_second / self.deep_first if self.deep_first else 0.0
        return Flush(
            width=width,
            p1=self.first / self.verifies,
            mean_na=self.accepted / self.verifies,
            depth=depth,
            p2_cond=p2_cond,
            seconds=now - self.started,
        )


class AcceptBuckets:
    """Verify outcomes per width: a bucket for each up to the cap, and one for all wider ones."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._buckets: dict[int, _Bucket] = {}

    def record(self, width: int, drafts: int, accepted: int, now: float) -> Flush | None:
        """Count one sequence's verify; the flush of its bucket when that makes it full.

        Args:
            width: decoding sequences of the step.
            drafts: that were verified; 0 is no verify and is not counted.
            accepted: leading drafts that matched.
            now: seconds of any steady clock.
        """
        if drafts == 0:
            return None
        key = min(width, self._cap + 1)
        bucket = self._buckets.setdefault(key, _Bucket(started=now))
        bucket.add(drafts, accepted)
        if bucket.verifies < FLUSH_VERIFIES:
            return None
        del self._buckets[key]
        return bucket.flush(key, now)


class AdaptiveRung:
    """One controller for all widths of WIDTHS.

    Args:
        num_drafts: ceiling; below two there is nothing to choose.
        ladder: what it lifts, and never lowers.
        pinned: the ladder was set by hand or the rung is static, and stays.
    """

    def __init__(
        self, num_drafts: int, ladder: Ladder | None = DEFAULT_LADDER, *, pinned: bool = False
    ) -> None:
        self._num_drafts = num_drafts
        self._ladder = ladder
        self._acts = num_drafts >= _DEEP and ladder is not None and not pinned
        self._p1: float | None = None
        self._p1_slow = 0.0
        self._p1_slow_at_depth = 0.0
        self._p2_cond: float | None = None
        self._flushes_since_depth = 0
        self._deep = False
        self._probes = 0

    @property
    def probes(self) -> int:
        """Flushes that were taken at two drafts only to see the second's chance."""
        return self._probes

    @property
    def probing(self) -> bool:
        """Whether the next flush is to be taken at two drafts only to see the second's chance."""
        if not self._acts or self._deep:
            return False
        return (
            self._p2_cond is None
            or self._p1_slow - self._p1_slow_at_depth >= PROBE_RISE
            or self._flushes_since_depth >= PROBE_FLUSHES
        )

    @property
    def ratio(self) -> float | None:
        """The smoothed token ratio, None before the second draft was ever seen."""
        if self._p1 is None or self._p2_cond is None:
            return None
        return token_ratio(self._p1, self._p2_cond)

    def drafts(self, n_active: int) -> int:
        """Drafts per sequence of a step of this width, before the clamp to the slots."""
        base = mtp_ladder_drafts(n_active, self._num_drafts, self._ladder)
        if self._acts and n_active in WIDTHS and (self._deep or self.probing):
            return max(base, _DEEP)
        return base

    def observe(self, flush: Flush) -> bool:
        """Learn from a flush; whether the rung changed. Stale and other widths' are ignored."""
        if not self._acts or flush.stale or flush.width not in WIDTHS:
            return False
        if self._p1 is None:
            self._p1 = self._p1_slow = flush.p1
        else:
            self._p1 += _FAST * (flush.p1 - self._p1)
            self._p1_slow += _SLOW * (flush.p1 - self._p1_slow)
        if flush.p2_cond is None:
            self._flushes_since_depth += 1
        else:
            self._probes += not self._deep
            self._see_depth(flush.p2_cond)
        was = self._deep
        ratio = self.ratio
        if ratio is not None:
            self._deep = ratio >= (SHALLOW_RATIO if was else DEEPEN_RATIO)
        return self._deep != was

    def _see_depth(self, p2_cond: float) -> None:
        known = self._p2_cond
        self._p2_cond = p2_cond if known is None else known + _FAST * (p2_cond - known)
        self._p1_slow_at_depth = self._p1_slow
        self._flushes_since_depth = 0
