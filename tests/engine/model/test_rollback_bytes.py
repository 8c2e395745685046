"""State bytes that each rollback mode moves, counted by the pool against closed formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.hybrid import HybridModel
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import RowPhase, Verified
from tests.oracle.checkpoints import make
from tests.oracle.ours import build, segment
from tests.oracle.test_logits import prompt

K = 4
LAYERS, HEADS, DK, DV, CONV_DIM, TAPS = 3, 4, 16, 16, 2 * 2 * 16 + 4 * 16, 4
H = LAYERS * HEADS * DK * DV * 4
CONV = LAYERS * CONV_DIM * TAPS * 4
BLOB = H + CONV
GATES = 2 * HEADS
CARRY_ROW = LAYERS * (CONV_DIM + GATES) * 4
REPLAY_ROW = LAYERS * (CONV_DIM + HEADS * DV + GATES) * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("bytes"), "qwen3_5", 2).folder


def moved_by_verify(model: HybridModel, emitted: int) -> tuple[int, int]:
    """(by the verify of K rows and its commit, by the plain step after it)."""
    ids = prompt(30)
    model.forward([segment(0, 0, ids[:20], RowPhase.PREFILL)])
    before = model.state_bytes
    model.forward([segment(0, 20, ids[20 : 20 + K], RowPhase.DECODE, committed=1)])
    model.accept([Verified(0, K, emitted)])
    verified = model.state_bytes
    model.forward([segment(0, 20 + emitted, ids[20 + emitted : 21 + emitted], RowPhase.DECODE)])
    return verified - before, model.state_bytes - verified


@pytest.mark.parametrize("emitted", [1, 2, 3, 4])
def test_bytes(folder: Path, emitted: int) -> None:
    moved = {
        mode: moved_by_verify(build(folder, "cpu", drafts=K - 1, mode=mode), emitted)
        for mode in SsmRollbackMode
    }
    partial = emitted < K
    # One read and one write; unverified rows go to the ring and come back in the next step.
    carry = (2 * BLOB + (K - 1) * CARRY_ROW, 2 * BLOB + (emitted - 1) * CARRY_ROW)
    # A checkpoint; after a partial accept the way back and a second run of the emitted rows.
    again = 2 * BLOB + 2 * BLOB + emitted * REPLAY_ROW
    replay = (4 * BLOB + (K - 1) * REPLAY_ROW + (again if partial else 0), 2 * BLOB)
    # A checkpoint and a state per row; after a partial accept one of them is copied back.
    copies = (K - 1) * H + K * CONV
    snapshot = (4 * BLOB + copies + (2 * BLOB if partial else 0), 2 * BLOB)
    assert moved == {
        SsmRollbackMode.CARRY: carry,
        SsmRollbackMode.REPLAY: replay,
        SsmRollbackMode.SNAPSHOT: snapshot,
    }


def broken(x: Tensor) -> Tensor:
    raise RuntimeError("broken head")


@pytest.mark.parametrize("mode", [SsmRollbackMode.REPLAY, SsmRollbackMode.SNAPSHOT])
def test_a_verify_that_raises_is_undone_from_its_checkpoint(
    folder: Path, mode: SsmRollbackMode
) -> None:
    model = build(folder, "cpu", mode=mode)
    ids = prompt(30)
    model.forward([segment(0, 0, ids[:20], RowPhase.PREFILL)])
    state = model.states.h[:, 0].clone()
    model.network = replace(model.network, lm_head=broken)
    with pytest.raises(RuntimeError):
        model.forward([segment(0, 20, ids[20:24], RowPhase.DECODE, committed=1)])
    assert torch.equal(model.states.h[:, 0], state)
