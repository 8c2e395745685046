"""Splitting a wide verify into forwards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvariantError
from engine.reserve.ladder import mtp_ladder_drafts
from engine.speculation.row_budget import split_verify


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([], []),
        ([4] * 8, [8]),
        ([2] * 32, [32]),
        ([3] * 16, [16]),
        ([2] * 33, [32, 1]),
        ([4] * 32, [24, 8]),
        ([2] * 64, [32, 32]),
        ([96, 1], [1, 1]),
        ([50, 50, 46], [1, 2]),
    ],
)
def test_a_wide_verify_is_split(rows: list[int], want: list[int]) -> None:
    assert [len(run) for run in split_verify(rows)] == want


def test_every_step_of_the_default_ladder_is_one_forward_up_to_32() -> None:
    for n in range(1, 33):
        assert len(split_verify([mtp_ladder_drafts(n, 3) + 1] * n)) == 1


def test_a_verify_that_no_forward_carries_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="97 rows; one forward carries 96"):
        split_verify([2, 97])


@settings(deadline=None)
@given(st.lists(st.integers(1, 96), max_size=200))
def test_forwards_hold_every_sequence_once_and_are_as_wide_as_allowed(rows: list[int]) -> None:
    runs = split_verify(rows)
    assert [index for run in runs for index in run] == list(range(len(rows)))
    for number, run in enumerate(runs):
        used = sum(rows[index] for index in run)
        assert 0 < len(run) <= 32
        assert used <= 96
        if number + 1 < len(runs):
            assert len(run) == 32 or used + rows[run.stop] > 96
