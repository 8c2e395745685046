"""Stop strings over text that arrives in pieces. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Releases text up to a stop string and no character of it.

    The stop string that is complete first wins, and among those that are complete at the same
    character the longest; so the result does not depend on how the text was cut into pieces. At
    most `longest stop - 1` characters are held back.
    """

    __slots__ = ("_held", "_longest", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that is now certain to precede any stop string; sets `stopped` at a match."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        start = self._match()
        if start >= 0:
            released, self._held, self.stopped = self._held[:start], "", True
            return released
        keep = self._partial()
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return released

    def finish(self) -> str:
        """The text that was held back for a match that did not come."""
        released, self._held = self._held, ""
        return released

    def _match(self) -> int:
        """Start of the stop string that completes first, or -1."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start)
                best = candidate if best is None else min(best, candidate)
        return -1 if best is None else best[1]

    def _partial(self) -> int:
        """Length of the longest tail that could still grow into a stop string."""
        held = self._held
        for length in range(min(len(held), self._longest - 1), 0, -1):
            tail = held[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
