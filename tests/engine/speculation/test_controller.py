"""The controller on simulated machines: it finds the best depth, keeps it, and follows drift."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.controller import WINDOW, SpecController, given_ratios
from tests.engine.speculation.simulator import (
    Cost,
    Step,
    best_rate,
    expected_tokens,
    simulate,
)

GOOD, PROSE, BAD = (0.85, 0.8, 0.75), (0.7, 0.54, 0.4), (0.1, 0.1, 0.1)
SEEDS = range(4)


def linear(fixed: float, row: float, draft: float) -> Cost:
    """Seconds of a step that reads weights once, then pays per row and per drafting pass."""
    return lambda width, drafts: fixed + row * width * (drafts + 1) + draft * drafts


def steep(width: int, drafts: int) -> float:
    """Depth three is nearly free for one sequence, and every row counts for 32."""
    return 1.0 + 0.1 * drafts if width < 4 else 1.0 + 0.35 * width * (1 + drafts)


CURVES: dict[str, Cost] = {
    "rows are cheap": linear(1.0, 0.01, 0.05),
    "rows cost": linear(1.0, 0.05, 0.08),
    "never pays": linear(1.0, 1.0, 0.3),
    "three at one, none at 32": steep,
}


def achieved(trace: list[Step], width: int, odds: tuple[float, ...], cost: Cost) -> float:
    """Rate of the depths that ran, without the luck of the draws, over that of the best depth."""
    tokens = sum(width * expected_tokens(odds, step.drafts) for step in trace)
    return tokens / sum(cost(width, step.drafts) for step in trace) / best_rate(width, odds, cost)


def switches_per_window(trace: list[Step]) -> int:
    """Most changes of depth within any WINDOW consecutive steps."""
    changed = [a.depth != b.depth for a, b in pairwise(trace)]
    return max(sum(changed[i : i + WINDOW]) for i in range(len(changed)))


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("odds", [GOOD, PROSE, BAD])
@pytest.mark.parametrize("width", [1, 8, 32])
def test_within_three_percent_of_the_best_depth_after_200_steps(
    name: str, odds: tuple[float, ...], width: int
) -> None:
    cost = CURVES[name]
    rates = []
    for seed in SEEDS:
        trace = simulate(SpecController(3), 800, width, lambda _: odds, cost, seed=seed)
        assert switches_per_window(trace) <= 1
        rates.append(achieved(trace[200:], width, odds, cost))
    assert sum(rates) / len(rates) >= 0.97
    assert min(rates) >= 0.94


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize(
    ("before", "after"), [(GOOD, BAD), (BAD, GOOD), (PROSE, GOOD), (GOOD, PROSE)]
)
@pytest.mark.parametrize("width", [1, 8, 32])
def test_acceptance_that_turns_is_followed_within_200_steps(
    name: str, before: tuple[float, ...], after: tuple[float, ...], width: int
) -> None:
    cost = CURVES[name]
    rates = []
    for seed in SEEDS:
        controller = SpecController(3)
        trace = simulate(
            controller, 1300, width, lambda n: before if n < 500 else after, cost, seed=seed
        )
        assert switches_per_window(trace) <= 1
        rates.append(achieved(trace[700:], width, after, cost))
    assert sum(rates) / len(rates) >= 0.965
    assert min(rates) >= 0.9


def test_one_controller_settles_on_three_at_one_and_none_at_32() -> None:
    controller = SpecController(3)
    for part in range(6):
        for width in (1, 32):
            simulate(controller, 150, width, lambda _: GOOD, steep, seed=part, offset=150 * part)
    assert controller.depths() == {1: 3, 32: 0}


@pytest.mark.parametrize("width", [1, 4, 32])
def test_where_drafts_never_pay_looking_at_them_costs_two_percent_at_most(width: int) -> None:
    controller = SpecController(3)
    cost = linear(1.0, 1.0, 0.3)
    simulate(controller, 200, width, lambda _: BAD, cost, seed=1)
    trace = simulate(controller, 2000, width, lambda _: BAD, cost, seed=2)
    assert {step.depth for step in trace} == {0}
    assert achieved(trace, width, BAD, cost) >= 0.98
    assert controller.reprobes > 0
    assert controller.probes == 3


def test_hysteresis_two_depths_that_are_as_good_do_not_alternate() -> None:
    controller = SpecController(1)
    # One draft gives 1.5 tokens and costs 1.5 steps.
    simulate(
        controller,
        3000,
        8,
        lambda _: (0.5,),
        lambda _, drafts: 1.0 + 0.5 * drafts,
        seed=3,
        ceiling=1,
        first_guess=1,
    )
    assert controller.switches <= 3000 / WINDOW / 6


def test_a_machine_that_slows_down_for_everybody_changes_no_choice() -> None:
    controller = SpecController(3)
    cost = linear(1.0, 0.01, 0.05)
    simulate(controller, 300, 4, lambda _: GOOD, cost, seed=4)
    switches = controller.switches
    slower = simulate(
        controller, 600, 4, lambda _: GOOD, lambda w, d: 5 * cost(w, d), seed=5, offset=300
    )
    assert {step.depth for step in slower} == {3}
    assert controller.switches == switches


def test_a_single_hiccup_changes_no_choice() -> None:
    controller = SpecController(3)
    cost = linear(1.0, 0.01, 0.05)
    simulate(controller, 300, 4, lambda _: GOOD, cost, seed=6)
    for _ in range(3):
        drafts = controller.choose(4, 3, 3)
        controller.observe(4, drafts, [drafts] * 4, 60.0)
        trace = simulate(controller, 100, 4, lambda _: GOOD, cost, seed=7)
        assert {step.depth for step in trace} == {3}


def test_the_ceiling_holds_at_once_and_lifts_again() -> None:
    controller = SpecController(3)
    cost = linear(1.0, 0.01, 0.05)
    simulate(controller, 300, 4, lambda _: GOOD, cost, seed=8)
    low = simulate(controller, 100, 4, lambda _: GOOD, cost, seed=9, ceiling=1)
    assert max(step.drafts for step in low) == 1
    none = simulate(controller, 5, 4, lambda _: GOOD, cost, seed=9, ceiling=0)
    assert max(step.drafts for step in none) == 0
    high = simulate(controller, 300, 4, lambda _: GOOD, cost, seed=10)
    assert high[-1].depth == 3


def test_a_width_that_only_ever_had_a_low_ceiling() -> None:
    controller = SpecController(3)
    trace = simulate(controller, 300, 16, lambda _: GOOD, steep, seed=11, ceiling=1, first_guess=3)
    assert max(step.drafts for step in trace) == 1
    assert achieved(trace[200:], 16, GOOD[:1], steep) >= 0.96


def test_a_new_width_starts_where_its_neighbour_is() -> None:
    controller = SpecController(3)
    assert controller.choose(1, 3, 2) == 2
    simulate(controller, 300, 32, lambda _: BAD, steep, seed=12)
    assert controller.choose(28, 3, 3) == 0
    assert controller.choose(28, 3, 3) == 0


def test_a_width_that_comes_back_in_the_middle_of_a_probe() -> None:
    cost = CURVES["rows are cheap"]
    for stay in range(1, 30):
        controller = SpecController(3)
        for part in range(4):
            simulate(controller, stay, 4, lambda _: GOOD, cost, seed=part)
            simulate(controller, 70, 1, lambda _: GOOD, cost, seed=part)
        trace = simulate(controller, 200, 4, lambda _: GOOD, cost, seed=14)
        assert trace[-1].depth == 3


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5), st.integers(1, 20)), max_size=20),
    st.integers(0, 2**32),
)
def test_any_traffic_gets_a_depth_within_its_ceiling(
    num_drafts: int, parts: list[tuple[int, int, int]], seed: int
) -> None:
    # A generator of its own: every draw from hypothesis' would count against the example's size.
    rng = Random(seed)
    controller = SpecController(num_drafts)
    for width, ceiling, steps in parts * 5:
        for _ in range(steps):
            drafts = controller.choose(width, ceiling, rng.randint(0, 5))
            assert 0 <= drafts <= min(ceiling, num_drafts)
            ran = rng.choice([drafts, drafts, drafts, 0])
            accepted = [rng.randint(0, ran) for _ in range(width)]
            controller.observe(width, ran, accepted, rng.uniform(1e-4, 1.0))


def test_the_same_steps_give_the_same_choices() -> None:
    runs = [
        simulate(SpecController(3), 400, 8, lambda _: PROSE, CURVES["rows cost"], seed=13)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def timed(cost: Cost) -> dict[int, tuple[float, ...]]:
    return {width: tuple(cost(width, d) for d in range(4)) for width in (1, 2, 4, 8, 16, 32)}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("odds", [GOOD, PROSE, BAD])
@pytest.mark.parametrize("width", [1, 6, 8, 24, 32])
def test_known_costs_save_the_looks_at_every_depth(
    name: str, odds: tuple[float, ...], width: int
) -> None:
    cost = CURVES[name]
    rates = []
    for seed in SEEDS:
        controller = SpecController(3, timed(cost))
        trace = simulate(controller, 250, width, lambda _: odds, cost, seed=seed)
        assert controller.probes == 0
        assert switches_per_window(trace) <= 1
        rates.append(achieved(trace[50:], width, odds, cost))
    assert sum(rates) / len(rates) >= 0.97


def test_costs_that_changed_since_the_start_are_found_out() -> None:
    cost = CURVES["rows are cheap"]
    # At the start drafts seemed to cost ten times a step.
    controller = SpecController(3, {4: (1.0, 10.0, 20.0, 30.0)})
    assert controller.choose(4, 3, 3) == 0
    trace = simulate(controller, 4000, 4, lambda _: GOOD, cost, seed=3)
    assert trace[-1].depth == 3


def test_given_ratios_lie_between_the_widths_that_were_timed() -> None:
    costs = {2: (1.0, 1.5), 4: (2.0, 5.0), 8: (4.0,)}
    assert given_ratios(costs, 1) == (1.0, 1.5)
    assert given_ratios(costs, 2) == (1.0, 1.5)
    assert given_ratios(costs, 3) == (1.0, 2.0)
    assert given_ratios(costs, 6) == (1.0,)
    assert given_ratios(costs, 100) == (1.0,)
    assert given_ratios({}, 3) == ()


def given_up(costs: dict[int, tuple[float, ...]], width: int) -> SpecController:
    """A controller that has seen nothing but rejected drafts, and plain-decodes."""
    controller = SpecController(3, costs)
    for _ in range(60):
        depth = controller.choose(width, 3, 3)
        controller.observe(width, depth, [0] * width, costs[width][depth])
    assert controller.choose(width, 3, 3) == 0
    return controller


def test_where_every_step_carries_a_prompt_drafts_come_back_all_the_same() -> None:
    controller = given_up({4: (1.0, 1.2, 1.4, 1.6)}, 4)
    depths = []
    for _ in range(600):
        depths.append(controller.choose(4, 3, 3))
        controller.see(4, depths[-1], [depths[-1]] * 4)
    assert depths[-1] == 3
    # And while they stay away, looking for them takes a hundredth of the time.
    controller = given_up({4: (1.0, 1.2, 1.4, 1.6)}, 4)
    depths = []
    for _ in range(2000):
        depths.append(controller.choose(4, 3, 3))
        controller.see(4, depths[-1], [0] * 4)
    assert 0 < sum(depth > 0 for depth in depths) < 100


def test_a_plain_step_that_speaks_for_eight_pays_for_as_many() -> None:
    def first_probe(steps: int) -> int:
        controller = given_up({4: (1.0, 1.2, 1.4, 1.6)}, 4)
        for asked in range(5000):
            if controller.choose(4, 3, 3):
                return asked * steps
            controller.observe(4, 0, [0] * 4, 1.0, steps)
        raise AssertionError("never probed")

    alone = first_probe(1)
    assert 8 <= first_probe(8) <= alone + 32
