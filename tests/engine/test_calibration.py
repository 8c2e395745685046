"""Timing steps before the first request: what it runs, what it finds, and what it leaves alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from torch import Tensor

from engine.calibration import EXPLORED, LIMIT, SWEEPS, TIMED, calibrate
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import DraftRows, ForwardResult, PlainRows, Proposal, Segment, Verified
from engine.speculation.policy import ControllerMode, PolicySettings
from tests.engine.fake_model import FakeModel, request

POLICY = PolicySettings(num_drafts=3)
CONFIG = EngineConfig("", max_batch_size=40, max_seq_len=512, speculation=POLICY)
BLOCKS = 90


class Recorder(FakeModel):
    """Proposes token 0, and notes (sequences, rows of the widest) of every forward."""

    state_bytes = 0

    def __init__(self) -> None:
        super().__init__(40, BLOCKS, 97)
        self.seen: list[tuple[int, int]] = []

    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        self.seen.append((len(segments), max(len(s.token_ids) for s in segments)))
        return super().forward(segments)

    def accept(self, verified: Sequence[Verified]) -> None:
        pass

    def remember(self, rows: PlainRows, hidden: Tensor) -> None:
        pass

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        return [Proposal((0,) * r.drafts, (-0.1 * r.drafts,) * r.drafts) for r in rows]


def ticks(step: float = 0.001) -> object:
    numbers = count()
    return lambda: next(numbers) * step


def test_every_depth_runs_at_every_width_and_takes_what_the_clock_says() -> None:
    model = Recorder()
    costs = calibrate(CONFIG, model, BLOCKS, clock=ticks(1e-6))  # type: ignore[arg-type]
    assert list(costs) == [1, 2, 4, 8, 16, 32]
    assert all(len(seconds) == 4 and min(seconds) > 0 for seconds in costs.values())
    # 32 sequences of four rows are verified in two forwards, for the row budget.
    for width in (1, 2, 4, 8, 16):
        assert {rows for seen, rows in model.seen if seen == width} >= {1, 2, 3, 4}


def test_every_depth_is_explored_then_timed_as_often() -> None:
    model = Recorder()
    told: list[bool] = []
    calibrate(CONFIG, model, BLOCKS, told.append, clock=ticks(1e-6))  # type: ignore[arg-type]
    assert told == [True, False] * 6
    # Plain steps do not go on for a while once another depth is pinned.
    seen = Counter(rows for width, rows in model.seen if width == 16)
    steps = EXPLORED + SWEEPS * (1 + TIMED)
    assert all(seen[rows] >= steps for rows in (1, 2, 3, 4)), seen


def test_a_slow_moment_of_the_machine_changes_no_cost() -> None:
    def run(slow: range) -> dict[int, tuple[float, ...]]:
        numbers, now = count(), 0.0

        def clock() -> float:
            nonlocal now
            now += 1e-5 if next(numbers) in slow else 1e-6
            return now

        return dict(calibrate(CONFIG, Recorder(), BLOCKS, clock=clock))

    calm, all_slow = run(range(0)), run(range(10**9))
    assert all_slow[2] == pytest.approx([10 * seconds for seconds in calm[2]])
    # As long as all depths of the four narrowest widths take in one sweep, begun anywhere.
    length = 4 * 4 * (2 * TIMED + 4)
    for begin in range(0, 2 * length, 7):
        found = run(range(begin, begin + length))
        for width, seconds in calm.items():
            assert found[width] == pytest.approx(seconds), (begin, width)


def test_nothing_is_left_behind() -> None:
    def tokens(model: Recorder) -> list[int]:
        core = EngineCore(CONFIG, model, kv_blocks=BLOCKS)
        core.add(request(1, [5, 6, 7], max_tokens=30, temperature=1.0, seed=4))
        found: list[int] = []
        while core.has_work():
            for delta in core.step():
                found += delta.token_ids
        return found

    calm, timed = Recorder(), Recorder()
    calibrate(CONFIG, timed, BLOCKS)
    assert tokens(timed) == tokens(calm)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, speculation=None),
        replace(CONFIG, speculation=replace(POLICY, controller=ControllerMode.OFF)),
        replace(CONFIG, max_seq_len=64),
    ],
    ids=["no speculation", "no controller", "no room"],
)
def test_where_nothing_can_be_learnt_nothing_runs(config: EngineConfig) -> None:
    model = Recorder()
    assert calibrate(config, model, BLOCKS) == {}
    assert model.seen == []


def test_slots_that_verify_less_are_timed_so_deep() -> None:
    snapshot = replace(POLICY, rollback=SsmRollbackMode.SNAPSHOT)
    costs = calibrate(replace(CONFIG, speculation=snapshot), Recorder(), BLOCKS)
    assert {width: len(seconds) - 1 for width, seconds in costs.items()} == {
        1: 3, 2: 3, 4: 3, 8: 3, 16: 1, 32: 1,
    }  # fmt: skip


def test_a_small_pool_and_a_slow_model_are_timed_at_few_widths() -> None:
    assert list(calibrate(CONFIG, Recorder(), 9)) == [1, 2, 4]
    slow = ticks(LIMIT)
    assert list(calibrate(CONFIG, Recorder(), BLOCKS, clock=slow)) == [1]  # type: ignore[arg-type]
