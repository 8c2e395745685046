"""Stop strings: nothing of them is released, nothing else is lost, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_server.text.stops import StopMatcher


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    released = "".join(matcher.feed(piece) for piece in pieces)
    return released + matcher.finish(), matcher.stopped


@pytest.mark.parametrize(
    ("stops", "text", "released"),
    [
        (["DEFGHIJ"], "ABCDEFGHIJK", "ABC"),
        (["F"], "ABCDEFG", "ABCDE"),
        (["ab", "abc"], "xxabcd", "xx"),
        (["abcx", "bc"], "zabcd", "za"),
        (["bc", "abc"], "zabc", "z"),
        (["aab"], "aaab!", "a"),
        (["END"], "the EN of it", "the EN of it"),
        ([], "all", "all"),
    ],
)
def test_text_ends_right_before_the_stop_string(stops: list[str], text: str, released: str) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert run(pieces, stops) == (released, released != text)


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_cut_of_the_text_does_not_matter(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    expected = run([text], stops)
    assert run(pieces, stops) == expected
    assert text.startswith(expected[0])
    assert not any(stop in expected[0] for stop in stops)
    assert expected[1] == any(stop in text for stop in stops)


def test_no_more_than_the_longest_stop_is_held_back() -> None:
    matcher = StopMatcher(["abcde", "xy"])
    received = 0
    for sent, char in enumerate("zzabcdabcdxzabcd", start=1):
        received += len(matcher.feed(char))
        assert sent - received <= 4


def test_after_a_match_nothing_comes() -> None:
    matcher = StopMatcher(["s"])
    assert matcher.feed("as") == "a"
    assert matcher.feed("more") == ""
    assert matcher.finish() == ""
