"""The chain of a small head drafts what the general passes draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.runner import DraftRows, RowPhase
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
