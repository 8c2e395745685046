"""After a rollback of the real model: state and KV, bit for bit those of the right turns alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.model.hybrid import HybridModel
from engine.request import FinishReason, GenerationRequest, SamplingParams
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import RowPhase
from engine.scheduler import Sequence
from engine.speculation.policy import ControllerMode, PolicySettings
from tests.oracle import ours

TINY = Path(__file__).resolve().parents[3] / "spark_server" / "assets" / "spark-tiny"
# Ids of "Mira ran.", after which spark-tiny goes in circles.
PROMPT = (44, 72, 411, 1019, 13)


def build(speculation: PolicySettings | None, **more: int) -> BuiltEngine:
    config = EngineConfig(
        str(TINY),
        max_batch_size=3,
        max_seq_len=512,
        memory_budget=3 << 30,
        threads=1,
        watchdogs=True,
        prefix_caching=True,
        snapshot_slots=6,
        speculation=speculation,
        **more,
    )
    return build_engine(config, lambda phase, seconds, detail="": None)


def speculating(mode: SsmRollbackMode) -> PolicySettings:
    return PolicySettings(num_drafts=3, rollback=mode, controller=ControllerMode.OFF)


@pytest.fixture(scope="module")
def right() -> HybridModel:
    """Runs the tokens that stayed, one by one."""
    return ours.build(TINY, "cpu")


def reference(right: HybridModel, tokens: list[int], computed: int) -> None:
    right.claim_slot(0)
    prompt = list(PROMPT)
    right.forward([ours.segment(0, 0, prompt, RowPhase.PREFILL)])
    for position in range(len(prompt), computed):
        token = tokens[position - len(prompt)]
        right.forward([ours.segment(0, position, [token], RowPhase.DECODE)])


def expect_equal(model: HybridModel, sequence: Sequence, right: HybridModel) -> None:
    slot = sequence.slot
    assert slot is not None
    if sequence.drafts or model.states.pending[slot]:
        model.fold([slot])
    assert torch.equal(model.states.h[:, slot], right.states.h[:, 0])
    assert torch.equal(model.states.conv[:, slot], right.states.conv[:, 0])
    layers = model.config.attention_layers
    for position in range(sequence.computed):
        block, at = sequence.block_table[position // 64], position % 64
        own = position // 64
        assert torch.equal(model.kv.k[:layers, block, :, :, at], right.kv.k[:layers, own, :, :, at])
        assert torch.equal(model.kv.v[:layers, block, :, at], right.kv.v[:layers, own, :, at])


@pytest.mark.parametrize(
    ("mode", "temperature"), [(None, 0.0), (None, 0.15), *((mode, 0.0) for mode in SsmRollbackMode)]
)
def test_state_and_kv_are_those_of_the_right_turns(
    right: HybridModel, mode: SsmRollbackMode | None, temperature: float
) -> None:
    """Right after each rollback, and again when the kept tokens were run up to the cut."""
    depth = {} if mode is None else {"decode_ring_slots": 4}
    built = build(None if mode is None else speculating(mode), **depth)
    sampling = SamplingParams(300, temperature, seed=5, ignore_eos=True)
    neighbour = GenerationRequest(2, PROMPT[:2], SamplingParams(250, 1.0, seed=1, ignore_eos=True))
    built.core.add(GenerationRequest(1, PROMPT, sampling, retractable=True))
    built.core.add(neighbour)
    kept: list[int] = []
    rollbacks, finish = 0, None
    while built.core.has_work():
        for delta in built.core.step():
            if delta.request_id != 1:
                continue
            finish = delta.finish_reason
            del kept[len(kept) - delta.retract :]
            kept.extend(delta.token_ids)
            if not delta.retract:
                continue
            rollbacks += 1
            sequence = built.core.scheduler.sequence(1)
            assert sequence.generated == kept
            reference(right, kept, sequence.computed)
            expect_equal(built.model, sequence, right)
            built.core.step()
            reference(right, sequence.generated, sequence.computed)
            expect_equal(built.model, sequence, right)
            kept = list(sequence.generated)
    assert rollbacks == 3 or temperature > 0
    assert rollbacks > 0
    assert finish in (FinishReason.STOP, FinishReason.LENGTH)


def test_with_speculation_there_is_no_ring_unless_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        built = build(speculating(SsmRollbackMode.CARRY))
    assert "Watchdogs stop and do not roll back: speculation is on" in caplog.text
    built.core.add(
        GenerationRequest(1, PROMPT, SamplingParams(300, 0.0, ignore_eos=True), retractable=True)
    )
    while built.core.has_work():
        deltas = built.core.step()
    stats = built.core.stats().watchdogs
    assert stats is not None
    assert stats.ring_slots == 0
    assert dict(stats.stops)["unreachable"] == 1
    assert deltas[-1].finish_reason is FinishReason.STOP
