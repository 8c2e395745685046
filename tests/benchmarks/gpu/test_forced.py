"""Drafts that are made to come true, and drafts that are known to be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.engines import (
    PROMPT,
    built,
    engine_config,
    forced_core,
    generate,
    request,
    speculation,
    timed_steps,
)
from benchmarks.gpu.forced import ForcedRunner
from benchmarks.gpu.options import Options
from benchmarks.gpu.reference import ReferenceRunner
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import DraftRows, ForwardResult, Proposal, RowPhase, Segment

OPTIONS = Options(device="cpu", smoke=True, kernels="naive")
MODEL = "miniature-3"


class Flat:
    """A runner whose logits are all zero and which drafts token 9."""

    vocab_size = 10
    device = torch.device("cpu")
    state_bytes = 0

    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        rows = sum(segment.logit_rows for segment in segments)
        return ForwardResult(torch.zeros(rows, self.vocab_size), torch.zeros(rows, 2))

    def claim_slot(self, slot: int) -> None: ...

    def move_slot(self, src: int, dst: int) -> None: ...

    def accept(self, verified: object) -> None: ...

    def remember(self, rows: object, hidden: object) -> None: ...

    def draft(self, rows: Sequence[DraftRows], hidden: object) -> list[Proposal]:
        return [Proposal((9,) * entry.drafts, (0.0,) * entry.drafts) for entry in rows]


def verify(*ids: int) -> Segment:
    return Segment(0, 100, ids, RowPhase.DECODE, 1, (0, 1), len(ids))


def test_only_drafts_up_to_the_first_rejected_one_are_touched() -> None:
    plain = Segment(1, 100, (5,), RowPhase.DECODE, 1, (2, 3), 1)
    prompt = Segment(2, 0, (1, 2, 3), RowPhase.PREFILL, 3, (4,), 0)
    segments = [plain, prompt, verify(4, 7, 8, 9)]
    sure = ForcedRunner(Flat(), 1.0).forward(segments).logits
    assert sure.argmax(-1)[1:4].tolist() == [7, 8, 9]
    assert not sure[0].any()
    assert not sure[4].any()
    never = ForcedRunner(Flat(), 0.0).forward(segments).logits
    assert never[1, 7] < 0
    assert never.count_nonzero() == 1


@pytest.mark.parametrize("mode", list(SsmRollbackMode))
def test_the_chance_shows_in_what_the_engine_accepts(mode: SsmRollbackMode) -> None:
    config = replace(engine_config(OPTIONS, 2, 128, "float32"), speculation=speculation(mode, 2, 3))
    with built(MODEL, config) as engine:
        all_true = timed_steps(forced_core(engine, config, 1.0), 2, 4)
        none_true = timed_steps(forced_core(engine, config, 0.0), 2, 4)
    assert (all_true.accepted, all_true.drafted, all_true.tokens) == (24, 24, 32)
    assert (none_true.accepted, none_true.drafted, none_true.tokens) == (0, 24, 8)
    assert all_true.seconds > 0
    assert all_true.context == PROMPT + 3 * 4 + 2 * 4


def test_a_known_answer_speeds_up_and_changes_nothing() -> None:
    config: EngineConfig = engine_config(OPTIONS, 3, 128, "float32")
    asked = [request(n, max_tokens=12 + n) for n in range(3)]
    with built(MODEL, config) as engine:
        want = generate(engine.core, asked)
    assert len(set(want)) == 3
    config = replace(config, speculation=speculation(SsmRollbackMode.CARRY, 3, 3))
    with built(MODEL, config) as engine:
        runner = ReferenceRunner(engine.model, want, PROMPT, 1.0)
        core = EngineCore(config, runner, kv_blocks=engine.ledger.kv_blocks)
        assert generate(core, asked) == want
        spec = core.stats().speculation
    assert spec is not None
    # Drafts of the last burst may lie behind the end of the answer.
    assert spec.accepted_tokens >= spec.draft_tokens - 3
    assert spec.accepted_tokens > 20


def test_a_wrong_answer_is_rejected() -> None:
    config = engine_config(OPTIONS, 1, 128, "float32")
    with built(MODEL, config) as engine:
        want = generate(engine.core, [request(0, max_tokens=12)])
    wrong = [tuple((token + 1) % 256 for token in want[0])]
    config = replace(config, speculation=speculation(SsmRollbackMode.REPLAY, 1, 3))
    with built(MODEL, config) as engine:
        core = EngineCore(
            config,
            ReferenceRunner(engine.model, wrong, PROMPT, 1.0),
            kv_blocks=engine.ledger.kv_blocks,
        )
        assert generate(core, [request(0, max_tokens=12)]) == want
        spec = core.stats().speculation
    assert spec is not None
    assert spec.accepted_tokens == 0
