"""Drafting between steps: whose time it is, and that a caller may do it or leave it to the step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.runner import DraftRows, PlainRows, Proposal
from engine.speculation.policy import ControllerMode, PolicySettings
from engine.speculator import REMEMBERED_ABOVE
from tests.engine.fake_model import request
from tests.engine.test_calibration import Recorder


class Slow(Recorder):
    """Takes a second of its own clock for every call that drafts, and nothing for a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        self.now += any(entry.drafts for entry in rows)
        return super().draft(rows, hidden)


def make(model: Slow) -> EngineCore:
    policy = PolicySettings(num_drafts=3, controller=ControllerMode.OFF)
    config = EngineConfig("", max_batch_size=4, max_seq_len=512, speculation=policy)
    core = EngineCore(config, model, kv_blocks=20, clock=lambda: model.now)
    core.add(request(1, [5, 6, 7], max_tokens=40))
    return core


@pytest.mark.parametrize("explicit", [False, True])
def test_drafts_count_with_the_step_that_verifies_them(explicit: bool) -> None:
    model = Slow()
    core = make(model)
    seconds = []
    while core.has_work():
        core.step()
        seconds.append(core.stats().last_step_seconds)
        if explicit:
            core.prepare()
            core.prepare()  # a second call finds nothing to do
    assert seconds[0] == 0.0, "nothing was drafted for the prompt"
    verifies = [s for s in seconds if s]
    assert verifies == [1.0] * len(verifies)
    assert len(verifies) == core.stats().speculation.steps_speculative  # type: ignore[union-attr]
    assert core.stats().step_seconds_total == sum(seconds) == model.now


class Remembering(Recorder):
    """Notes how many sequences each call of `remember` and `draft` came for."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: list[int] = []
        self.drafted: list[int] = []

    def remember(self, rows: PlainRows, hidden: Tensor) -> None:
        self.remembered.append(len(rows.slots))

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        self.drafted.append(len(rows))
        return super().draft(rows, hidden)


def test_far_above_the_cap_nothing_is_remembered_and_drafts_come_back_all_the_same() -> None:
    cap, most = 4, 20
    model = Remembering()
    policy = PolicySettings(num_drafts=3, controller=ControllerMode.OFF, mtp_max_seqs_override=cap)
    config = EngineConfig("", max_batch_size=most, max_seq_len=512, speculation=policy)
    core = EngineCore(config, model, kv_blocks=80)
    for i in range(most):
        core.add(request(i, [5, 6, 7], max_tokens=10 + 4 * i))
    running = most
    while core.has_work():
        before = len(model.remembered), len(model.drafted)
        core.step()
        core.prepare()
        after = len(model.remembered), len(model.drafted)
        running = core.stats().running
        if running > cap + REMEMBERED_ABOVE:
            assert after == before, "nobody would read it"
        elif cap < running < most:
            assert after > before
    assert max(model.remembered) == cap + REMEMBERED_ABOVE
    assert max(model.drafted) == cap
    speculation = core.stats().speculation
    assert speculation is not None
    assert speculation.steps_speculative > 0
    reasons = dict(speculation.reasons)
    assert sum(reasons.values()) == speculation.steps_plain
    assert reasons["too_wide"] > speculation.steps_speculative
