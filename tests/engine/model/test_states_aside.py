"""States that are set aside in the middle of a verify, and sequences that begin behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.forms import forms_agree
from engine.model.hybrid import HybridModel
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import DraftRows, Restore, RowPhase, Save, SavedState, Verified
from tests.oracle.checkpoints import make
from tests.oracle.ours import BLOCKS_EACH, build, segment
from tests.oracle.test_logits import prompt

K = 4
START = 64
IDS = prompt(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("aside"), "qwen3_5", 4).folder


def state(model: HybridModel, slot: int) -> tuple[Tensor, Tensor]:
    return model.states.h[:, slot].clone(), model.states.conv[:, slot].clone()


def begin(model: HybridModel, slot: int, tokens: int) -> None:
    model.claim_slot(slot)
    model.forward([segment(slot, 0, IDS[:START], RowPhase.PREFILL)])
    for position in range(START, tokens):
        model.forward([segment(slot, position, IDS[position : position + 1], RowPhase.DECODE)])


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    # The oldest column of the convolution's inputs is never read.
    return torch.equal(a[0], b[0]) and torch.equal(a[1][..., 1:], b[1][..., 1:])


@pytest.mark.parametrize("emitted", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", list(SsmRollbackMode))
def test_a_state_within_a_verify_is_that_of_plain_steps(
    folder: Path, mode: SsmRollbackMode, emitted: int
) -> None:
    model = build(folder, "cpu", drafts=K - 1, mode=mode, snapshots=1)
    for wanted in range(1, emitted + 1):
        begin(model, 1, START + 3)
        begin(model, 2, START + 3 + wanted)
        start = START + 3
        drafts = IDS[start : start + emitted] + [9] * (K - emitted)
        result = model.forward([segment(1, start, drafts, RowPhase.DECODE, committed=1)])
        model.accept([Verified(1, K, emitted)])
        model.save_state(SavedState(1, 0, K, emitted, wanted, wanted - 1), result.hidden)
        kept = model.snapshots.h[:, 0], model.snapshots.conv[:, 0]
        assert same(kept, state(model, 2)), (mode, wanted)
        # The slot itself goes on as if nobody had looked.
        for slot in (1, 2):
            at = start + (emitted if slot == 1 else wanted)
            for position in range(at, start + emitted + 2):
                model.forward(
                    [segment(slot, position, IDS[position : position + 1], RowPhase.DECODE)]
                )
        assert same(state(model, 1), state(model, 2)), (mode, wanted)


@pytest.mark.parametrize("ops", ["cpu", "naive"])
def test_a_prompt_behind_a_state_that_was_set_aside_gives_the_same_bits(
    folder: Path, ops: str
) -> None:
    model = build(folder, ops, snapshots=2)
    begin(model, 0, START)
    whole = model.forward([segment(0, START, IDS[START:100], RowPhase.PREFILL)])
    model.claim_slot(1)
    saving = replace(segment(1, 0, IDS[:100], RowPhase.PREFILL), saves=(Save(START, 1),))
    moved = model.state_bytes
    other = segment(2, 0, IDS[:3], RowPhase.PREFILL)
    rows = model.forward([other, saving])
    # States begin at zero: they are written only, two of them and the one that is set aside.
    assert model.state_bytes - moved == 3 * model.states.blob_bytes
    if ops == "cpu":
        assert torch.equal(rows.hidden[3 + START :], whole.hidden)
    model.note_hidden(1, torch.ones(64))
    model.states.h[:, 3] = 5.0
    model.claim_slot(3)
    model.restore(Restore(3, 1, START, START, IDS[START]))
    # It reads the KV of slot 1's block and writes to its own.
    own = segment(3, START, IDS[START:100], RowPhase.PREFILL)
    first = segment(1, 0, [0], RowPhase.PREFILL).block_table[:1]
    table = (*first, *own.block_table[1:])
    behind = model.forward([replace(own, block_table=table)])
    assert torch.equal(whole.logits, behind.logits)
    assert torch.equal(whole.hidden, behind.hidden)
    assert same(state(model, 0), state(model, 3))


def test_the_drafter_behind_a_prefix_drafts_as_one_that_saw_all_of_it(folder: Path) -> None:
    model = build(folder, "cpu", snapshots=1)
    assert model.drafter is not None
    proposals = []
    for slot in (0, 1):
        table = tuple(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH))
        model.claim_slot(slot)
        if slot == 0:
            result = model.forward([segment(0, 0, IDS[:START], RowPhase.PREFILL)])
            nexts = tuple(IDS[1 : START + 1])
            model.draft([DraftRows(0, 0, 0, nexts, table, True, 0)], result.hidden)
            assert model.drafted_rows(0) == (0, START)
            model.save_state(SavedState(0, 0, START, START, START, START - 1), result.hidden)
        else:
            model.kv.k[:, BLOCKS_EACH] = model.kv.k[:, 0]
            model.kv.v[:, BLOCKS_EACH] = model.kv.v[:, 0]
            # Of the last row in the block the drafter's part depends on what follows.
            model.kv.k[-1, BLOCKS_EACH, :, :, START - 1] = 3.0
            model.kv.v[-1, BLOCKS_EACH, :, START - 1] = 3.0
            model.restore(Restore(1, 0, START, 0, IDS[START]))
            assert model.drafted_rows(1) == (0, START - 1)
        result = model.forward([segment(slot, START, IDS[START:80], RowPhase.PREFILL)])
        nexts = tuple(IDS[START + 1 : 81])
        proposals += model.draft([DraftRows(slot, START, 0, nexts, table, True, 3)], result.hidden)
        assert model.drafted_rows(slot) == (0, 80)
    assert proposals[0] == proposals[1]
    assert len(proposals[0].tokens) == 3


def test_a_prefix_without_drafted_rows_is_seen_from_its_last_row_on(folder: Path) -> None:
    model = build(folder, "cpu", snapshots=1)
    model.claim_slot(2)
    model.restore(Restore(2, 0, START, START, 5))
    assert model.drafted_rows(2) == (START - 1, START - 1)


def test_the_forms_agree_where_the_operators_say_so(folder: Path) -> None:
    assert forms_agree(build(folder, "cpu"))
    assert not forms_agree(build(folder, "naive"))
