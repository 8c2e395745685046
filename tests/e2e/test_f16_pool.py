"""A float16 state pool: other tokens than float32, and the same ones however they come about."""

from __future__ import annotations

from itertools import islice

import pytest

from engine.request import GenerationRequest
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from tests.e2e.work import Answer, core, growing, requests, run


def some() -> list[GenerationRequest]:
    return list(islice(requests(), 24))


@pytest.fixture(scope="module")
def alone() -> dict[int, Answer]:
    return run(core(h_f16_pool=True, max_batch_size=1), some(), 1)


@pytest.fixture(scope="module")
def grown() -> dict[int, Answer]:
    return run(core(h_f16_pool=True), growing(), 1)


def speculation(mode: SsmRollbackMode) -> PolicySettings:
    return PolicySettings(num_drafts=3, rollback=mode, controller=ControllerMode.OFF)


def test_it_is_not_the_float32_state(alone: dict[int, Answer]) -> None:
    wide = run(core(), some(), 1)
    logprobs = [(wide[n].logprobs[0].logprob, alone[n].logprobs[0].logprob) for n in alone]
    assert any(a != b for a, b in logprobs)
    # The first token follows a prompt, whose state is rounded on the grid only.
    assert max(abs(a - b) for a, b in logprobs) < 0.05


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_prefill_tokens": 64}, {"prefix_caching": True, "snapshot_slots": 8}],
    ids=["wide", "split prompts", "cache"],
)
def test_no_bit_changes_by_company_split_or_cache(
    alone: dict[int, Answer], settings: dict[str, int]
) -> None:
    engine = core(h_f16_pool=True, max_batch_size=16, **settings)
    assert run(engine, some(), 24) == alone
    assert run(engine, some(), 24) == alone


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
def test_no_bit_changes_by_speculation(alone: dict[int, Answer], mode: SsmRollbackMode) -> None:
    engine = core(h_f16_pool=True, max_batch_size=8, speculation=speculation(mode))
    for width in (1, 24):
        assert run(engine, some(), width) == alone
    stats = engine.stats().speculation
    assert stats is not None
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("mode", [None, SsmRollbackMode.CARRY])
def test_no_bit_changes_by_preemption(
    grown: dict[int, Answer], mode: SsmRollbackMode | None
) -> None:
    policy = None if mode is None else speculation(mode)
    small = core(h_f16_pool=True, max_batch_size=8, kv_tokens=320, speculation=policy)
    assert run(small, growing(), 12) == grown
    assert small.stats().preemptions > 0
