"""Speculation is invisible: the packaged model's tokens and log-probabilities, bit for bit."""

from __future__ import annotations

import asyncio

import pytest

from engine.core import EngineCore
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from tests.e2e.servers import gauges, serving, wait_idle
from tests.e2e.work import Answer, bodies, core, growing, post_all, requests, run
from tests.spark_server.test_server import Server


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
def test_no_bit_changes_in_any_mode(alone: dict[int, Answer], mode: SsmRollbackMode) -> None:
    policy = PolicySettings(num_drafts=3, rollback=mode, controller=ControllerMode.OFF)
    engine = core(speculation=policy)
    for width in (1, 32):
        assert run(engine, requests(), width) == alone
    stats = engine.stats().speculation
    assert stats is not None
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.fixture(scope="module")
def grown(wide: EngineCore) -> dict[int, Answer]:
    return run(wide, growing(), 1)


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
def test_no_bit_changes_under_preemption(grown: dict[int, Answer], mode: SsmRollbackMode) -> None:
    policy = PolicySettings(num_drafts=3, rollback=mode, controller=ControllerMode.OFF)
    small = core(max_batch_size=8, kv_tokens=320, speculation=policy)
    assert run(small, growing(), 12) == grown
    stats = small.stats()
    assert stats.preemptions > 0
    assert stats.speculation is not None
    assert stats.speculation.accepted_tokens > 0


@pytest.mark.server
def test_no_byte_changes_over_http(server: Server) -> None:
    work = bodies(24)
    want = asyncio.run(post_all(server.url, work, 32))
    with serving("--speculative", "--max-batch-size", "8", "--max-seq-len", "1024") as other:
        assert asyncio.run(post_all(other.url, work, 12)) == want
        wait_idle(other.url)
        assert gauges(other.url)["spark_engine_restarts_total"] == 0
