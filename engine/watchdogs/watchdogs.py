"""Watches every running output after each step, and steers back or stops what goes in circles.

Stands between scheduler and states: knows no logits and no text. A step without watchdogs does not
come here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Protocol

from engine.request import FinishReason, TokenDelta, WatchdogStats
from engine.scheduler import Phase, Scheduler, Sequence
from engine.watchdogs.detectors import Detection, DetectionKind
from engine.watchdogs.watch import RollBack, SequenceWatch, StopCause, WatchdogSettings

logger = logging.getLogger(__name__)


class Ring(Protocol):
    """Copies of whole states by place; see `engine.pools.snapshots`."""

    @property
    def places(self) -> int:
        """Copies that there is room for."""
        ...

    def save(self, slot: int, place: int) -> None:
        """Copy the state in `slot` to `place`; nothing of it may be pending."""
        ...

    def load(self, place: int, slot: int) -> None:
        """Copy what lies at `place` into `slot`."""
        ...


class _Watched:
    """A sequence with its watch and its row of the ring, None while it has none."""

    __slots__ = ("row", "sequence", "watch")

    def __init__(self, sequence: Sequence, watch: SequenceWatch) -> None:
        self.sequence = sequence
        self.watch = watch
        self.row: int | None = None


class Watchdogs:
    """Detections, snapshots and rollbacks of all sequences.

    Args:
        ring: places for `rows` sequences, equally many each; 0 places only stop, never roll back.
        rows: sequences that run at once.
        fold: runs the pending rows of slots on their states.
        boundaries: byte per id, 1 for tokens that end a sentence or a line.
        settings: see WatchdogSettings.
    """

    def __init__(
        self,
        ring: Ring,
        rows: int,
        fold: Callable[[Listing[int]], None],
        boundaries: bytes,
        settings: WatchdogSettings | None = None,
    ) -> None:
        self._ring = ring
        self._fold = fold
        self._boundaries = boundaries
        self._settings = settings or WatchdogSettings()
        self._depth = ring.places // rows
        self._free_rows = list(range(rows))
        self._watched: dict[int, _Watched] = {}
        self._detections = dict.fromkeys(DetectionKind, 0)
        self._stops = dict.fromkeys(StopCause, 0)
        self._rollbacks = 0
        self._retracted = 0

    @property
    def rolls_back(self) -> bool:
        """Whether outputs may be cut, and not only stopped."""
        return self._depth > 0

    def observe(self, deltas: Listing[TokenDelta], scheduler: Scheduler) -> list[TokenDelta]:
        """Look at what a step added, after its commit; returns the deltas to send instead."""
        self._sweep()
        return [
            delta if delta.finish_reason is not None else self._look(delta, scheduler)
            for delta in deltas
        ]

    def stats(self) -> WatchdogStats:
        """Gauges and counters as of now."""
        return WatchdogStats(
            ring_slots=self._depth,
            detections=tuple((kind.value, n) for kind, n in self._detections.items()),
            rollbacks=self._rollbacks,
            retracted=self._retracted,
            stops=tuple((cause.value, n) for cause, n in self._stops.items()),
        )

    def _sweep(self) -> None:
        """Forget sequences that ended, and the snapshots of those that lost their slot."""
        for key, watched in list(self._watched.items()):
            if watched.sequence.slot is not None:
                continue
            if watched.row is not None:
                self._free_rows.append(watched.row)
                watched.row = None
                watched.watch.drop_snapshots()
            if watched.sequence.phase is Phase.FINISHED:
                del self._watched[key]

    def _look(self, delta: TokenDelta, scheduler: Scheduler) -> TokenDelta:
        if not delta.token_ids:
            return delta
        watched = self._of(scheduler.sequence(delta.request_id))
        sequence, watch = watched.sequence, watched.watch
        if watch.ban_is_over():
            sequence.sampling.ban((), 0)
        detection = watch.feed(delta.token_ids)
        if detection is None:
            if watch.wants_snapshot(delta.token_ids[-1]):
                self._save(watched)
            return delta
        self._detections[detection.kind] += 1
        verdict = watch.decide(detection, sequence.generated)
        if isinstance(verdict, RollBack):
            return self._roll_back(watched, verdict, detection, delta, scheduler)
        return self._stop(sequence, verdict, detection, delta, scheduler)

    def _of(self, sequence: Sequence) -> _Watched:
        watched = self._watched.get(sequence.request_id)
        if watched is None:
            watch = SequenceWatch(
                self._settings,
                self._boundaries,
                depth=self._depth,
                retractable=sequence.request.retractable,
                stop_ids=sequence.stop_ids,
            )
            watched = self._watched[sequence.request_id] = _Watched(sequence, watch)
        return watched

    def _save(self, watched: _Watched) -> None:
        slot = watched.sequence.slot
        assert slot is not None
        if watched.row is None:
            watched.row = self._free_rows.pop()
        self._fold((slot,))
        self._ring.save(slot, watched.row * self._depth + watched.watch.take_place())

    def _roll_back(
        self,
        watched: _Watched,
        to: RollBack,
        detection: Detection,
        delta: TokenDelta,
        scheduler: Scheduler,
    ) -> TokenDelta:
        sequence = watched.sequence
        assert sequence.slot is not None
        assert watched.row is not None
        found = len(sequence.generated)
        self._ring.load(watched.row * self._depth + to.place, sequence.slot)
        scheduler.roll_back(sequence.request_id, to.length, len(sequence.prompt) + to.snapshot - 1)
        sequence.sampling.ban(tuple(to.banned), to.until)
        watched.watch.rolled_back(to, sequence.generated)
        self._rollbacks += 1
        self._retracted += found - to.length
        logger.debug(
            "Request %d: a %s from token %d on, seen at %d, cut to %d",
            sequence.request_id,
            detection.kind.value,
            detection.start,
            found,
            to.length,
        )
        sent = found - len(delta.token_ids)
        kept = max(to.length - sent, 0)
        return replace(
            delta,
            token_ids=delta.token_ids[:kept],
            logprobs=delta.logprobs[:kept],
            retract=max(sent - to.length, 0),
        )

    def _stop(
        self,
        sequence: Sequence,
        cause: StopCause,
        detection: Detection,
        delta: TokenDelta,
        scheduler: Scheduler,
    ) -> TokenDelta:
        self._stops[cause] += 1
        logger.debug(
            "Request %d: a %s from token %d on, stopped at %d (%s)",
            sequence.request_id,
            detection.kind.value,
            detection.start,
            len(sequence.generated),
            cause.value,
        )
        # Output that a grammar holds is incomplete, which `stop` would deny.
        whole = sequence.request.grammar is None
        end = scheduler.stop(
            sequence.request_id, FinishReason.STOP if whole else FinishReason.LENGTH
        )
        return replace(delta, finish_reason=end.finish_reason, stats=end.stats)
