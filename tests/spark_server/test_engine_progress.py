"""Working, computing, hanging, standing still: told apart without waiting."""

from __future__ import annotations

import pytest

from engine.request import EngineStats, TokenDelta
from spark_server.engine_progress import COMPUTING_TIMEOUTS, ProgressClock
from spark_server.wire import Heartbeat, StepReport


def beat(step_age: float | None, cpu: float) -> Heartbeat:
    return Heartbeat(step_age, cpu, 0, 0)


def test_a_step_with_rows_or_deltas_is_progress_and_an_empty_one_is_not() -> None:
    clock = ProgressClock(20, now=0)
    clock.report(StepReport((), EngineStats(last_step_rows=3), stepped=True), now=5)
    assert clock.age(7) == 2
    clock.report(StepReport((TokenDelta(1),), EngineStats(), stepped=True), now=8)
    assert clock.age(8) == 0
    clock.report(StepReport((), EngineStats(last_step_rows=3), stepped=False), now=9)
    clock.report(StepReport((), EngineStats(), stepped=True), now=10)
    assert clock.age(10) == 2
    assert clock.silence(10) == 0
    clock.report(StepReport((), EngineStats(held=1), stepped=False), now=11)
    assert clock.age(11) == 0, "a grammar is being compiled"


@pytest.mark.parametrize(("cpu_share", "stuck"), [(0.0, True), (0.05, True), (0.2, False)])
def test_a_long_step_is_stuck_unless_it_computes(cpu_share: float, stuck: bool) -> None:
    clock = ProgressClock(20, now=0)
    for second in range(61):
        clock.beat(beat(second, second * cpu_share), now=second)
    assert clock.stuck(60.0, loading=False, working=True) is stuck
    assert not clock.stuck(60.0, loading=False, working=False)


def test_even_a_computing_step_ends_one_day() -> None:
    clock = ProgressClock(20, now=0)
    stuck_at = next(
        second
        for second in range(10_000)
        if clock.beat(beat(second, float(second)), now=second)
        or clock.stuck(second, loading=False, working=True)
    )
    assert stuck_at == pytest.approx(20 * COMPUTING_TIMEOUTS + 20, abs=2)


def test_beats_between_steps_are_no_progress() -> None:
    clock = ProgressClock(20, now=0)
    for second in range(30):
        clock.beat(beat(None, float(second)), now=second)
    assert clock.stuck(30, loading=False, working=True)


def test_silence_is_a_fault_also_when_idle_but_not_before_the_first_beat_of_a_start() -> None:
    clock = ProgressClock(20, now=0)
    assert clock.stuck(20, loading=False, working=False)
    assert not clock.stuck(1000, loading=True, working=False)
    clock.beat(beat(None, 0.0), now=1000)
    assert not clock.stuck(1059, loading=True, working=False)
    assert clock.stuck(1060, loading=True, working=False)


def test_a_pause_of_the_observer_is_forgiven() -> None:
    clock = ProgressClock(20, now=0)
    clock.own_pause(100)
    assert not clock.stuck(110, loading=False, working=True)
    assert clock.stuck(121, loading=False, working=True)


def test_work_that_begins_after_an_idle_hour_has_its_full_time() -> None:
    clock = ProgressClock(20, now=0)
    clock.heard(3600)
    clock.work_begins(3600)
    assert not clock.stuck(3619, loading=False, working=True)
