"""Which drafts D-Cut drops."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvariantError
from engine.speculation.dcut import KEEP_BUCKETS, dcut_drafts


def test_dcut_keeps_the_drafts_that_are_most_likely_to_survive() -> None:
    sure, unsure = [-0.1, -0.1, -0.1], [-0.5, -1.0, -2.0]
    # Survivals of the later drafts: -0.2 and -0.3 against -1.5 and -3.5; 3 of 4 stay.
    assert dcut_drafts([3, 3], [sure, unsure]) == (3, 2)
    assert dcut_drafts([3, 3], [unsure, sure], keep=0.5) == (1, 3)
    assert dcut_drafts([3, 3], [unsure, sure], keep=0.25) == (1, 2)
    assert dcut_drafts([3, 3], [unsure, sure], keep=1.0) == (3, 3)


def test_dcut_leaves_wide_batches_and_switched_off_ones_alone() -> None:
    low = [[-9.0] * 3] * 9
    assert dcut_drafts([3] * 9, low) == (3,) * 9
    # 14 of 18 later drafts stay: the shallower ones of all nine, then the earliest five.
    assert dcut_drafts([3] * 9, low, max_seqs=9) == (3,) * 5 + (2,) * 4
    assert dcut_drafts([3], low[:1], max_seqs=0) == (3,)


def test_missing_confidences_count_as_certain() -> None:
    assert dcut_drafts([3, 3], [[-0.5, -0.5, -0.5], []], keep=0.5) == (1, 3)
    assert dcut_drafts([3, 3], [[-0.5, -0.5, -0.5], [math.nan] * 3], keep=0.5) == (1, 3)
    assert dcut_drafts([3, 3], [[-0.5], [-0.1]], keep=0.5) == (1, 3)


@pytest.mark.parametrize(
    ("drafts", "logprobs", "keep", "text"),
    [([1], [[]], 0.6, "not 0.6"), ([1, 1], [[]], 0.75, "2 draft counts and 1 lists")],
)
def test_dcut_refuses_what_cannot_be(
    drafts: list[int], logprobs: list[list[float]], keep: float, text: str
) -> None:
    with pytest.raises(InvariantError, match=text):
        dcut_drafts(drafts, logprobs, keep=keep)


LOGPROBS = st.lists(st.floats(-20, 0.5) | st.just(math.nan), max_size=6)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), LOGPROBS), max_size=8),
    st.sampled_from(KEEP_BUCKETS),
)
def test_dcut_keeps_its_share_and_every_first_draft(
    batch: list[tuple[int, list[float]]], keep: float
) -> None:
    drafts, logprobs = [d for d, _ in batch], [p for _, p in batch]
    kept = dcut_drafts(drafts, logprobs, keep=keep)
    later = sum(max(count - 1, 0) for count in drafts)
    assert all(min(d, 1) <= k <= d for d, k in zip(drafts, kept, strict=True))
    assert sum(kept) == sum(min(d, 1) for d in drafts) + math.ceil(keep * later)
    # Nothing that was dropped was likelier than something that was kept.
    gains, losses = [], []
    for count, known, stay in zip(drafts, logprobs, kept, strict=True):
        sums, total = [], 0.0
        for depth in range(count):
            value = known[depth] if depth < len(known) else 0.0
            total += 0.0 if math.isnan(value) else min(value, 0.0)
            sums.append(total)
        gains += sums[1:stay]
        losses += sums[max(stay, 1) :]
    if gains and losses:
        assert min(gains) >= max(losses)
