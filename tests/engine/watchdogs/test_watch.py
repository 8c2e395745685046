"""Where an output is cut, which snapshots are kept, and what is banned; no engine."""

from __future__ import annotations

import pytest

from engine.watchdogs.detectors import Detection, DetectionKind
from engine.watchdogs.watch import RollBack, SequenceWatch, StopCause, WatchdogSettings

SETTINGS = WatchdogSettings(max_rollbacks=2, banned_tokens=3, ban_length=5, reach=40, max_extra=8)
END = 1  # the only token that ends a sentence
MASK = bytes([0, 1]) + bytes(98)


def watch(*, depth: int = 4, retractable: bool = True, stop: int = 99) -> SequenceWatch:
    return SequenceWatch(
        SETTINGS, MASK, depth=depth, retractable=retractable, stop_ids=frozenset({stop})
    )


def fed(tokens: list[int], **more: int) -> SequenceWatch:
    """A watch that saw the tokens one by one and kept every snapshot that it wanted."""
    made = watch(**more)
    for token in tokens:
        assert made.feed([token]) is None
        if made.wants_snapshot(token):
            made.take_place()
    return made


def at(start: int) -> Detection:
    return Detection(DetectionKind.LOOP, start)


def words(count: int, *ends: int) -> list[int]:
    """Different tokens, with ends of sentences at these indices."""
    return [END if i in ends else 2 + i % 90 for i in range(count)]


def snapshots_of(tokens: list[int], depth: int) -> list[tuple[int, int]]:
    """(position, place) of every snapshot as it was taken."""
    made, taken = watch(depth=depth), []
    for token in tokens:
        made.feed([token])
        if made.wants_snapshot(token):
            taken.append((made.seen, made.take_place()))
    return taken


def test_snapshots_are_spaced_over_the_reach_and_taken_at_boundaries() -> None:
    """A reach of 40 in 4 places: 10 apart at least, 20 at most."""
    taken = snapshots_of(words(60, 3, 11, 14, 24), 4)
    assert [position for position, _ in taken] == [1, 12, 25, 45]
    assert snapshots_of(words(60), 4) == [(1, 3), (21, 2), (41, 1)]


def test_the_oldest_place_is_used_again() -> None:
    taken = snapshots_of(words(90), 2)
    assert [position for position, _ in taken] == [1, 41, 81]
    assert taken[2][1] == taken[0][1] != taken[1][1]


def test_the_cut_is_the_last_boundary_before_the_loop_when_it_is_near() -> None:
    tokens = words(40, 9, 20)
    made = fed(tokens)
    for start, length in ((30, 30), (29, 21), (22, 21), (21, 21), (20, 20), (18, 10), (11, 10)):
        verdict = made.decide(at(start), tokens)
        assert isinstance(verdict, RollBack)
        assert verdict.length == length
        assert verdict.snapshot <= length
        assert verdict.banned == frozenset(tokens[length : length + 3])
        assert verdict.until == length + 5


def test_an_end_of_the_sequence_is_never_banned() -> None:
    tokens = words(40)
    verdict = fed(tokens, stop=tokens[31]).decide(at(30), tokens)
    assert isinstance(verdict, RollBack)
    assert verdict.banned == {tokens[30], tokens[32]}


def test_what_was_banned_at_a_place_stays_banned_there() -> None:
    first = words(40)
    made = fed(first)
    back = made.decide(at(25), first)
    assert isinstance(back, RollBack)
    made.rolled_back(back, first[: back.length])
    assert made.seen == back.length == 25
    other = [*first[:25], *range(60, 75)]
    made.feed(other[25:])
    again = made.decide(at(25), other)
    assert isinstance(again, RollBack)
    assert again.banned == {*first[25:28], 60, 61, 62}
    later = made.decide(at(32), other)
    assert isinstance(later, RollBack)
    assert later.banned == {67, 68, 69}


def test_a_ban_is_over_once() -> None:
    tokens = words(40)
    made = fed(tokens)
    assert not made.ban_is_over()
    back = made.decide(at(25), tokens)
    assert isinstance(back, RollBack)
    made.rolled_back(back, tokens[:25])
    made.feed([60] * 4)
    assert not made.ban_is_over()
    made.feed([61])
    assert [made.ban_is_over(), made.ban_is_over()] == [True, False]


def test_snapshots_of_the_wrong_turn_are_given_up() -> None:
    tokens = words(45)
    made = fed(tokens)  # snapshots at 1, 21, 41
    back = made.decide(at(30), tokens)
    assert isinstance(back, RollBack)
    assert back.snapshot == 21
    made.rolled_back(back, tokens[:30])
    other = [*tokens[:30], *range(60, 75)]
    made.feed(other[30:])
    again = made.decide(at(44), other)
    assert isinstance(again, RollBack)
    assert again.snapshot == 21
    made.take_place()
    last = made.decide(at(45), [*other, 5])
    assert isinstance(last, RollBack)
    assert last.snapshot == 45


def test_why_an_output_is_stopped() -> None:
    tokens = words(40)
    sent = watch(retractable=False)
    sent.feed(tokens)
    assert not sent.wants_snapshot(END)
    assert sent.decide(at(30), tokens) is StopCause.SENT
    without = watch(depth=0)
    without.feed(tokens)
    assert not without.wants_snapshot(END)
    assert without.decide(at(30), tokens) is StopCause.UNREACHABLE
    made = fed(tokens)
    made.drop_snapshots()
    assert made.decide(at(30), tokens) is StopCause.UNREACHABLE
    assert made.wants_snapshot(tokens[-1])


def test_an_output_is_steered_back_so_often_and_no_more() -> None:
    tokens = words(40)
    made = fed(tokens)
    for _ in range(2):
        back = made.decide(at(30), tokens)
        assert isinstance(back, RollBack)
        made.rolled_back(back, tokens[:30])
        made.feed(tokens[30:])
    assert made.decide(at(30), tokens) is StopCause.EXHAUSTED


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_after_dropping_all_places_are_free_again(depth: int) -> None:
    made = fed(words(90), depth=depth)
    made.drop_snapshots()
    places = set()
    for _ in range(depth):
        places.add(made.take_place())
    assert places == set(range(depth))
