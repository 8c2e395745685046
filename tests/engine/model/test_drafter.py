"""The chain of a small head drafts what the general passes draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.pools.shapes import LOG_ROWS
from engine.runner import DraftRows, PlainRows, RowPhase
from tests.oracle.checkpoints import make
from tests.oracle.ours import build, segment
from tests.oracle.test_logits import prompt


@pytest.mark.parametrize("tied", [True, False])
def test_chain_and_passes_agree(tmp_path: Path, tied: bool) -> None:
    oracle = make(tmp_path, "qwen3_5", 2, tied=tied, bf16=True)
    model = build(oracle.folder, "cpu")
    assert model.drafter is not None
    assert model.network.mtp is not None
    assert model.network.mtp.chain is not None
    ids = prompt(70)
    hidden = model.forward(
        [segment(slot, 0, ids[:69], RowPhase.PREFILL) for slot in range(5)]
    ).hidden

    def drafts(slots: range) -> list[tuple[int, ...]]:
        rows = []
        for slot in slots:
            model.claim_slot(slot)
            table = segment(slot, 0, [0], RowPhase.DECODE).block_table
            rows.append(
                DraftRows(slot, 0, 69 * slot, tuple(ids[1:70]), table, engaged=True, drafts=3)
            )
        return [proposal.tokens for proposal in model.draft(rows, hidden)]

    chained = drafts(range(4))
    general = drafts(range(5))
    assert chained == general[:4]
    assert len(set(chained)) == 1
    uneven = replace(
        DraftRows(0, 0, 0, tuple(ids[1:70]), (), engaged=True, drafts=2),
        block_table=segment(0, 0, [0], RowPhase.DECODE).block_table,
    )
    model.claim_slot(0)
    (two,) = model.draft([uneven], hidden)
    assert two.tokens == chained[0][:2]
    assert torch.isfinite(torch.tensor(two.logprobs)).all()


def test_only_hidden_states_that_last_wait_to_be_copied(tmp_path: Path) -> None:
    drafter = build(make(tmp_path, "qwen3_5", 2).folder, "cpu").drafter
    assert drafter is not None
    slots, width = np.array([2, 0]), drafter.log.shape[2]

    def step(position: int, *, lasting: bool) -> torch.Tensor:
        hidden = torch.full((2, width), float(position))
        at = np.array([position, position])
        drafter.remember(PlainRows(slots, at, None, [1, 2]), hidden, lasting=lasting)
        return hidden

    def noted() -> list[float]:
        return drafter.log[2, :12, 0].tolist()

    # What the next step writes over was copied at once, behind what waited before it.
    step(0, lasting=True)
    assert noted()[:2] == [0.0, 0.0]
    step(1, lasting=True)
    step(2, lasting=False).zero_()
    assert noted()[:4] == [0.0, 1.0, 2.0, 0.0]
    for position in range(3, 11):
        assert noted()[3:] == [0.0] * 9
        step(position, lasting=True)
    # The eighth is the last to wait.
    assert noted() == [float(p) for p in range(11)] + [0.0]
    step(11, lasting=True)
    drafter.claim(1)
    assert noted()[11] == 11.0
    assert LOG_ROWS > 12
