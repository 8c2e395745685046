"""The adaptive rung: its ratio, its buckets, and what it does under two kinds of traffic."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.reserve.ladder import DEFAULT_LADDER, mtp_ladder_drafts, parse_ladder
from engine.speculation.adaptive_rung import (
    FLUSH_VERIFIES,
    AcceptBuckets,
    AdaptiveRung,
    Flush,
    token_ratio,
)
from tests.engine.speculation.vectors import cases

PROSE, TOOLS = 0.54, 0.877


def flush(
    p1: float = 0.8, p2_cond: float | None = None, *, width: int = 16, seconds: float = 1.0
) -> Flush:
    depth = 1 if p2_cond is None else 2
    mean = p1 * (1.0 + (p2_cond or 0.0))
    return Flush(width=width, p1=p1, mean_na=mean, depth=depth, p2_cond=p2_cond, seconds=seconds)


def fill(buckets: AcceptBuckets, outcomes: list[tuple[int, int]], width: int = 16) -> Flush:
    """The flush of FLUSH_VERIFIES (drafts, accepted) outcomes, 10 ms apart."""
    assert len(outcomes) == FLUSH_VERIFIES
    found = [
        buckets.record(width, drafts, accepted, now=index / 100)
        for index, (drafts, accepted) in enumerate(outcomes)
    ]
    assert found[:-1] == [None] * (FLUSH_VERIFIES - 1)
    assert found[-1] is not None
    return found[-1]


@pytest.mark.parametrize("case", cases("token_ratio"))
def test_token_ratio(case: dict[str, Any]) -> None:
    assert token_ratio(case["p1"], case["p2_cond"]) == pytest.approx(case["want"], abs=1e-12)


@pytest.mark.parametrize("p1", [math.nan, math.inf, -math.inf])
def test_a_chance_that_is_no_number_gives_no_ratio(p1: float) -> None:
    assert token_ratio(p1, 0.9) == 1.0


@settings(deadline=None)
@given(st.floats(0.01, 1), st.floats(0, 1))
def test_the_ratio_is_that_of_the_tokens_per_step(p1: float, p2_cond: float) -> None:
    assert token_ratio(p1, p2_cond) == pytest.approx((1 + p1 + p1 * p2_cond) / (1 + p1))


def test_a_flush_at_one_draft_does_not_see_the_second() -> None:
    found = fill(AcceptBuckets(32), [(1, 1)] * 96 + [(1, 0)] * 32)
    assert (found.p1, found.mean_na, found.depth, found.p2_cond) == (0.75, 0.75, 1, None)
    assert found.seconds == pytest.approx(1.27)
    assert not found.stale


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=FLUSH_VERIFIES, max_size=FLUSH_VERIFIES))
def test_at_two_drafts_the_second_follows_from_the_mean(accepted: list[int]) -> None:
    found = fill(AcceptBuckets(32), [(2, count) for count in accepted])
    assert found.depth == 2
    want = 0.0 if found.p1 == 0 else (found.mean_na - found.p1) / found.p1
    assert found.p2_cond == pytest.approx(want)


def test_at_three_drafts_the_third_does_not_count_as_a_second() -> None:
    found = fill(AcceptBuckets(32), [(3, 3)] * 64 + [(3, 1)] * 64)
    assert (found.depth, found.mean_na, found.p2_cond) == (3, 2.0, 0.5)


def test_a_few_verifies_cut_short_by_a_length_do_not_hide_the_depth() -> None:
    found = fill(AcceptBuckets(32), [(2, 2)] * 100 + [(1, 1)] * 28)
    assert (found.depth, found.p2_cond) == (2, 1.0)
    found = fill(AcceptBuckets(32), [(2, 2)] * 28 + [(1, 1)] * 100)
    assert (found.depth, found.p2_cond) == (1, None)


def test_every_width_has_its_bucket_and_wider_ones_share_one() -> None:
    buckets = AcceptBuckets(4)
    for _ in range(FLUSH_VERIFIES - 1):
        assert buckets.record(3, 1, 1, now=0.0) is None
        assert buckets.record(4, 1, 0, now=0.0) is None
    shared = [buckets.record(5 + n % 3, 1, 1, now=0.0) for n in range(FLUSH_VERIFIES)]
    found = shared[-1]
    assert found is not None
    assert found.width == 5
    last = buckets.record(3, 1, 1, now=0.0), buckets.record(4, 1, 0, now=0.0)
    assert [f.p1 for f in last if f is not None] == [1.0, 0.0]


def test_a_step_without_drafts_is_no_verify() -> None:
    buckets = AcceptBuckets(32)
    assert all(buckets.record(16, 0, 0, now=0.0) is None for _ in range(2 * FLUSH_VERIFIES))


def test_prose_and_tool_shaped_traffic_land_on_different_rungs() -> None:
    for p2_cond, rung, ratio in ((PROSE, 1, 1.24), (TOOLS, 2, 1.39)):
        controller = AdaptiveRung(3)
        for _ in range(4):
            seen = p2_cond if controller.drafts(16) == 2 else None
            controller.observe(flush(0.8, seen))
        assert controller.drafts(16) == rung
        assert controller.ratio == pytest.approx(ratio, abs=0.005)


def test_it_acts_at_widths_9_to_16_only_and_never_below_the_ladder() -> None:
    controller = AdaptiveRung(3)
    assert controller.observe(flush(0.9, 0.9))
    for n in range(1, 65):
        ladder = mtp_ladder_drafts(n, 3)
        assert controller.drafts(n) == (2 if 9 <= n <= 16 else ladder)
    deep_ladder = AdaptiveRung(3, parse_ladder("16:3"))
    deep_ladder.observe(flush(0.9, 0.1))
    assert deep_ladder.drafts(12) == 3


@pytest.mark.parametrize(
    ("num_drafts", "ladder", "pinned", "drafts"),
    [(0, DEFAULT_LADDER, False, 0), (1, DEFAULT_LADDER, False, 1), (3, DEFAULT_LADDER, True, 1)],
)
def test_where_it_is_inert(num_drafts: int, ladder: Any, pinned: bool, drafts: int) -> None:
    controller = AdaptiveRung(num_drafts, ladder, pinned=pinned)
    assert not controller.probing
    assert not controller.observe(flush(1.0, 1.0))
    assert controller.drafts(16) == drafts


def test_without_a_ladder_there_is_nothing_to_lift() -> None:
    assert AdaptiveRung(3, None).drafts(16) == 3
    assert not AdaptiveRung(3, None).probing


def test_the_rung_is_left_at_a_lower_ratio_than_it_is_taken() -> None:
    # Ratio 1.31 lies between both limits: p1 1.0, second 0.62.
    low = AdaptiveRung(3)
    low.observe(flush(1.0, 0.62))
    assert low.drafts(16) == 1
    high = AdaptiveRung(3)
    high.observe(flush(1.0, 0.64))
    assert high.drafts(16) == 2
    for _ in range(20):
        high.observe(flush(1.0, 0.62))
    assert high.drafts(16) == 2
    changes = [high.observe(flush(1.0, 0.58)) for _ in range(20)]
    assert changes.count(True) == 1
    assert high.drafts(16) == 1


def test_half_of_every_flush_is_taken_over() -> None:
    controller = AdaptiveRung(3)
    controller.observe(flush(0.8, 0.5))
    controller.observe(flush(0.4, 0.9))
    assert controller.ratio == pytest.approx(token_ratio(0.6, 0.7))


def test_stale_flushes_and_those_of_other_widths_teach_nothing() -> None:
    controller = AdaptiveRung(3)
    assert not controller.observe(flush(0.9, 0.9, seconds=5.1))
    assert not controller.observe(flush(0.9, 0.9, width=8))
    assert not controller.observe(flush(0.9, 0.9, width=17))
    assert controller.ratio is None
    assert controller.observe(flush(0.9, 0.9, width=9, seconds=5.0))


def test_it_probes_until_the_second_draft_was_seen_once() -> None:
    controller = AdaptiveRung(3)
    assert controller.probing
    controller.observe(flush(0.8))
    assert controller.drafts(12) == 2
    assert controller.probes == 0
    controller.observe(flush(0.8, PROSE))
    assert not controller.probing
    assert controller.probes == 1
    assert controller.drafts(12) == 1


def test_traffic_that_accepts_nothing_does_not_probe_for_ever() -> None:
    controller, buckets = AdaptiveRung(3), AcceptBuckets(32)
    controller.observe(fill(buckets, [(2, 0)] * FLUSH_VERIFIES))
    assert not controller.probing
    assert controller.drafts(16) == 1


def test_a_risen_first_draft_is_a_reason_to_probe() -> None:
    controller = AdaptiveRung(3)
    controller.observe(flush(0.5, 0.5))
    flushes = 0
    while not controller.probing:
        controller.observe(flush(0.7))
        flushes += 1
    # The slow average of 0.5 towards 0.7 by 0.15 each: +0.030, +0.056, +0.077, +0.096.
    assert flushes == 4
    controller.observe(flush(0.7, 0.5))
    assert not controller.probing


def test_an_old_observation_is_renewed() -> None:
    controller = AdaptiveRung(3)
    controller.observe(flush(0.8, 0.5))
    for _ in range(2047):
        controller.observe(flush(0.8))
    assert not controller.probing
    controller.observe(flush(0.8))
    assert controller.probing


def test_traffic_that_turns_from_prose_to_tools_and_back() -> None:
    """Bursts drawn by chance, as they would be verified, through buckets and controller."""
    rng = random.Random(7)
    controller, buckets = AdaptiveRung(3), AcceptBuckets(32)
    rungs: list[int] = []

    def run(p1: float, p2_cond: float, verifies: int) -> None:
        for _ in range(verifies):
            drafts = controller.drafts(16)
            accepted = int(rng.random() < p1)
            if accepted and drafts == 2:
                accepted += int(rng.random() < p2_cond)
            found = buckets.record(16, drafts, accepted, now=0.0)
            if found is not None:
                controller.observe(found)
                rungs.append(controller.drafts(16))

    run(0.75, PROSE, 40 * FLUSH_VERIFIES)
    assert rungs[-20:].count(1) >= 18
    run(0.95, TOOLS, 40 * FLUSH_VERIFIES)
    assert rungs[-20:].count(2) == 20
    run(0.75, PROSE, 40 * FLUSH_VERIFIES)
    assert rungs[-20:].count(1) >= 18
