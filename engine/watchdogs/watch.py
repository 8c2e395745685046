"""Watches one output: feeds the detectors, keeps boundaries and snapshots, says where to cut.

Positions are counts of generated tokens. Knows no slots and no tensors, and does nothing by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.watchdogs.detectors import Detection, Detectors


@dataclass(frozen=True, slots=True)
class WatchdogSettings:
    """When and how far to go back; lengths in tokens.

    Attributes:
        max_rollbacks: of one output; after those it is stopped.
        banned_tokens: first tokens of the repeated continuation that are banned after a rollback.
        ban_length: tokens for which they are.
        reach: how far back the snapshots of an output lie; a loop is 512 tokens long at most
            before it is seen.
        max_extra: tokens before the loop that are given up to begin again at a boundary.
    """

    max_rollbacks: int = 3
    banned_tokens: int = 8
    ban_length: int = 8
    reach: int = 512
    max_extra: int = 64


class StopCause(StrEnum):
    """Why an output is stopped and not steered back.

    SENT: a stream, whose text cannot be taken back. EXHAUSTED: it was rolled back often enough.
    UNREACHABLE: no snapshot lies before the loop.
    """

    SENT = "sent"
    EXHAUSTED = "exhausted"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class RollBack:
    """Cut the output and go on differently.

    Attributes:
        length: tokens that stay.
        snapshot: position of the snapshot to go back to, at most `length`; tokens in between are
            run again.
        place: of that snapshot in the ring.
        banned: tokens that may not come before position `until`.
    """

    length: int
    snapshot: int
    place: int
    banned: frozenset[int]
    until: int


class SequenceWatch:
    """One output.

    Args:
        settings: see WatchdogSettings.
        boundaries: byte per id, 1 for tokens that end a sentence or a line; may be empty.
        depth: snapshots that the ring holds of this output.
        retractable: tokens may be taken back.
        stop_ids: are never banned.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        boundaries: bytes,
        *,
        depth: int,
        retractable: bool,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._settings = settings
        self._mask = boundaries
        self._depth = depth if retractable else 0
        self._spacing = settings.reach // depth if depth else 0
        self._retractable = retractable
        self._stop_ids = stop_ids
        self._detectors = Detectors()
        self._boundaries: list[int] = []
        self._snapshots: list[tuple[int, int]] = []  # (position, place), oldest first
        self._free = list(range(self._depth))
        self._banned: frozenset[int] = frozenset()
        self._banned_until = 0
        self.seen = 0
        self.rollbacks = 0

    def feed(self, tokens: Sequence[int]) -> Detection | None:
        """Take the tokens that follow those seen before."""
        for position, token in enumerate(tokens, self.seen + 1):
            if self._ends_here(token):
                self._boundaries.append(position)
        self.seen += len(tokens)
        return self._detectors.feed(tokens)

    def ban_is_over(self) -> bool:
        """Whether there was a ban and the next token is no longer under it; says so once."""
        if not self._banned or self.seen < self._banned_until:
            return False
        self._banned = frozenset()
        return True

    def wants_snapshot(self, last_token: int) -> bool:
        """Whether the state as it is now should be kept.

        At once when there is none, then at boundaries that lie far enough apart for the ring to
        span the reach, and without a boundary when twice that distance has none.
        """
        if not self._depth:
            return False
        if not self._snapshots:
            return True
        distance = self.seen - self._snapshots[-1][0]
        if distance >= 2 * self._spacing:
            return True
        return distance >= self._spacing and self._ends_here(last_token)

    def take_place(self) -> int:
        """The place for a snapshot of the state as it is now, the oldest one's if none is free."""
        place = self._free.pop() if self._free else self._snapshots.pop(0)[1]
        self._snapshots.append((self.seen, place))
        return place

    def drop_snapshots(self) -> None:
        """The ring's places are gone, e.g. with the sequence's slot."""
        self._snapshots.clear()
        self._free = list(range(self._depth))

    def decide(self, detection: Detection, output: Sequence[int]) -> RollBack | StopCause:
        """What to do about a detection in `output`, the tokens seen so far."""
        if not self._retractable:
            return StopCause.SENT
        if self.rollbacks >= self._settings.max_rollbacks:
            return StopCause.EXHAUSTED
        length = self._cut(detection.start)
        before = [entry for entry in self._snapshots if entry[0] <= length]
        if not before:
            return StopCause.UNREACHABLE
        position, place = before[-1]
        banned = frozenset(output[length : length + self._settings.banned_tokens]) - self._stop_ids
        if length < self._banned_until:
            banned |= self._banned  # what was tried here before does not come back
        return RollBack(length, position, place, banned, length + self._settings.ban_length)

    def rolled_back(self, to: RollBack, output: Sequence[int]) -> None:
        """The output is cut to `output`, its first `to.length` tokens."""
        self.rollbacks += 1
        self._banned, self._banned_until = to.banned, to.until
        self.seen = to.length
        self._free += [place for position, place in self._snapshots if position > to.length]
        self._snapshots = [entry for entry in self._snapshots if entry[0] <= to.length]
        del self._boundaries[bisect_right(self._boundaries, to.length) :]
        first = max(0, to.length - self._settings.reach)
        self._detectors = Detectors(first=first)
        self._detectors.feed(output[first : to.length])

    def _cut(self, start: int) -> int:
        """The last boundary at or before `start`, or `start` itself when that is far."""
        index = bisect_right(self._boundaries, start)
        nearest = self._boundaries[index - 1] if index else 0
        return nearest if nearest and start - nearest <= self._settings.max_extra else start

    def _ends_here(self, token: int) -> bool:
        return token < len(self._mask) and self._mask[token] == 1
