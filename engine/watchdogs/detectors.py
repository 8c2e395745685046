"""Two ways to see that generated ids repeat themselves, both fed one token at a time.

Know neither requests nor what is done about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class DetectionKind(StrEnum):
    """LOOP: the same tokens over and over. REPETITION: nearly so, with changes in between."""

    LOOP = "loop"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class Detection:
    """What was found; `start` is the index of the first token that repeats earlier ones."""

    kind: DetectionKind
    start: int


class LoopDetector:
    """Finds a period of at most `max_period` tokens that fills the end of the output.

    A loop is `repeats` whole copies, and `min_tokens` tokens at least, so that a ruler of dashes or
    an indent is none. A token costs as many steps as it has occurrences within `max_period`.

    Args:
        first: index of the first token that is fed.
    """

    __slots__ = ("_at", "_matches", "_max_period", "_min_tokens", "_next", "_repeats")

    def __init__(
        self, *, max_period: int = 128, repeats: int = 4, min_tokens: int = 64, first: int = 0
    ) -> None:
        self._max_period = max_period
        self._repeats = repeats
        self._min_tokens = min_tokens
        self._next = first
        self._at: dict[int, deque[int]] = {}
        # By period: how many tokens in a row, up to the last, equal the one a period before.
        self._matches: dict[int, int] = {}

    def feed(self, token: int) -> Detection | None:
        """Take the next token; a loop as soon as it is long enough, and again while it goes on."""
        index = self._next
        self._next += 1
        places = self._at.setdefault(token, deque(maxlen=self._max_period))
        before, matches = self._matches, {}
        found: int | None = None
        for place in reversed(places):
            period = index - place
            if period > self._max_period:
                break
            length = before.get(period, 0) + 1
            matches[period] = length
            if found is None and length >= self._enough(period):
                found = index - length + 1
        places.append(index)
        self._matches = matches
        return None if found is None else Detection(DetectionKind.LOOP, found)

    def _enough(self, period: int) -> int:
        """Tokens that must equal the one before: all copies but the first."""
        return max((self._repeats - 1) * period, self._min_tokens - period)


class RepetitionDetector:
    """Finds a window whose n-grams are nearly all repeats of others in it.

    The last `window` n-grams hold at most `share` of that number of different ones. Constant work
    per token.

    Args:
        first: index of the first token that is fed.
    """

    __slots__ = ("_counts", "_grams", "_most", "_next", "_size", "_tail", "_window")

    def __init__(
        self, *, size: int = 4, window: int = 256, share: float = 0.25, first: int = 0
    ) -> None:
        self._size = size
        self._window = window
        self._most = int(share * window)
        self._next = first
        self._tail: deque[int] = deque(maxlen=size)
        self._grams: deque[tuple[int, ...]] = deque()
        self._counts: dict[tuple[int, ...], int] = {}

    def feed(self, token: int) -> Detection | None:
        """Take the next token; a repetition while the window is full of it."""
        self._next += 1
        self._tail.append(token)
        if len(self._tail) < self._size:
            return None
        gram = tuple(self._tail)
        grams, counts = self._grams, self._counts
        grams.append(gram)
        counts[gram] = counts.get(gram, 0) + 1
        if len(grams) > self._window:
            oldest = grams.popleft()
            counts[oldest] -= 1
            if counts[oldest] == 0:
                del counts[oldest]
        if len(grams) < self._window or len(counts) > self._most:
            return None
        return Detection(DetectionKind.REPETITION, self._first_repeat())

    def _first_repeat(self) -> int:
        """Index of the first token of the first n-gram in the window that came before in it."""
        seen: set[tuple[int, ...]] = set()
        for number, gram in enumerate(self._grams):
            if gram in seen:
                return self._next - self._window - self._size + 1 + number
            seen.add(gram)
        raise AssertionError("a window without a repeat is no repetition")


class Detectors:
    """Both detectors over one output.

    Args:
        first: index of the first token that is fed.
    """

    __slots__ = ("_loop", "_repetition")

    def __init__(self, *, first: int = 0) -> None:
        self._loop = LoopDetector(first=first)
        self._repetition = RepetitionDetector(first=first)

    def feed(self, tokens: Iterable[int]) -> Detection | None:
        """Take the next tokens; what was found last among them, a loop before a repetition."""
        found: Detection | None = None
        for token in tokens:
            loop, repetition = self._loop.feed(token), self._repetition.feed(token)
            found = loop or repetition
        return found
