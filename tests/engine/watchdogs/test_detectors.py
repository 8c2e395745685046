"""The detectors against plain definitions, on generated ids and on what must not be found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.watchdogs.detectors import (
    Detection,
    DetectionKind,
    Detectors,
    LoopDetector,
    RepetitionDetector,
)

SMALL = {"max_period": 5, "repeats": 3, "min_tokens": 6}
# Few ids, so that repeats are the rule.
IDS = st.lists(st.integers(0, 2), max_size=60)


def loop_of(tokens: list[int], max_period: int, repeats: int, min_tokens: int) -> int | None:
    """Start of the second copy of the longest-standing loop that ends here, by definition."""
    starts = []
    for period in range(1, max_period + 1):
        length = 0
        while (
            len(tokens) - length - 1 >= period
            and tokens[-1 - length] == tokens[-1 - length - period]
        ):
            length += 1
        if length >= (repeats - 1) * period and length + period >= min_tokens:
            starts.append((period, len(tokens) - length))
    return min(starts)[1] if starts else None


@given(IDS)
def test_a_loop_is_what_the_definition_says_at_every_token(tokens: list[int]) -> None:
    detector = LoopDetector(**SMALL)
    for count, token in enumerate(tokens, 1):
        found = detector.feed(token)
        assert (found and found.start) == loop_of(tokens[:count], **SMALL)


@given(
    st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 99), min_size=1, max_size=40)
)
def test_a_loop_is_found_where_it_began(before: list[int], cycle: list[int]) -> None:
    """After any start: as soon as it is long enough, and its second copy is named."""
    detector = LoopDetector(max_period=40, repeats=4, min_tokens=64)
    tokens = before + cycle * 80
    results = (detector.feed(token) for token in tokens)
    count, found = next((n, found) for n, found in enumerate(results, 1) if found is not None)
    assert found.kind is DetectionKind.LOOP
    assert count <= len(before) + max(4 * len(cycle), 64)
    assert found.start <= len(before) + len(cycle)
    again = tokens[found.start : count]
    period = next(p for p in range(1, 41) if again == tokens[found.start - p : count - p])
    assert len(again) >= max(3 * period, 64 - period)


@given(IDS)
def test_a_repetition_is_what_the_definition_says_at_every_token(tokens: list[int]) -> None:
    size, window, share = 2, 12, 0.34
    detector = RepetitionDetector(size=size, window=window, share=share)
    for count, token in enumerate(tokens, 1):
        found = detector.feed(token)
        grams = [tuple(tokens[i : i + size]) for i in range(count - size + 1)]
        last = grams[-window:]
        if len(last) < window or len(set(last)) > int(share * window):
            assert found is None
            continue
        repeat = next(i for i, gram in enumerate(last) if gram in last[:i])
        assert found == Detection(DetectionKind.REPETITION, len(grams) - window + repeat)


def test_a_text_with_a_counter_in_it_is_a_repetition_and_no_loop() -> None:
    rng = random.Random(1)
    line = [rng.randrange(100, 200) for _ in range(24)]
    tokens = [rng.randrange(1000) for _ in range(50)]
    for number in range(40):
        tokens += [*line, 300 + number]
    loop, repetition = LoopDetector(), RepetitionDetector()
    assert not any(loop.feed(token) for token in tokens)
    found = next(filter(None, (repetition.feed(token) for token in tokens)))
    assert found.start == 50 + 25  # the second line


@pytest.mark.parametrize(
    "tokens",
    [
        [7] * 63,  # a ruler
        [1, 2] * 31,
        list(range(100)) * 3,
        [token for row in range(60) for token in (1, 2, 3, row % 37 + 50, row % 41 + 100, 4)],
    ],
    ids=["ruler", "pairs", "three times", "table"],
)
def test_what_repeats_a_little_is_left_alone(tokens: list[int]) -> None:
    assert Detectors().feed(tokens) is None


def test_random_text_is_left_alone() -> None:
    rng = random.Random(2)
    assert Detectors().feed(rng.choices(range(200), k=20_000)) is None


def test_a_detector_may_begin_late() -> None:
    for first in (0, 1000):
        detectors = Detectors(first=first)
        assert detectors.feed([5, 6, 7] * 21) is None
        assert detectors.feed([5]) == Detection(DetectionKind.LOOP, first + 3)
