"""Whether prompt rows and decode rows leave the same bits behind, tried on the loaded model.

Where they do, what decode steps computed is as good as a prompt's for whoever reuses it exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.runner import RowPhase, Segment

if TYPE_CHECKING:
    from engine.model.hybrid import HybridModel

# Enough for several conv windows and for products of odd heights, in one block of KV.
_ROWS = 21


def forms_agree(model: HybridModel) -> bool:
    """Run a few tokens in the padding slot, at once and one by one, and compare all that is left.

    A difference is certain, agreement is evidence: the operators also have to claim it.
    """
    tokens = [(7 * i + 3) % model.vocab_size for i in range(_ROWS)]
    slot, block = model.states.pending.shape[0] - 1, model.kv.dummy_block

    def rows(start: int, count: int, phase: RowPhase) -> Segment:
        ids = tuple(tokens[start : start + count])
        return Segment(slot, start, ids, phase, count, (block,), count)

    at_once = _run(model, [rows(0, _ROWS, RowPhase.PREFILL)])
    one_by_one = _run(model, [rows(i, 1, RowPhase.DECODE) for i in range(_ROWS)])
    return all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))


def _run(model: HybridModel, segments: list[Segment]) -> list[Tensor]:
    """Hidden states and logits of all rows, then state and KV that they leave behind."""
    results = [model.forward([segment]) for segment in segments]
    slot, block = segments[0].slot, model.kv.dummy_block
    return [
        torch.cat([result.hidden for result in results]),
        torch.cat([result.logits for result in results]),
        model.states.h[:, slot].clone(),
        model.states.conv[:, slot].clone(),
        model.kv.k[:, block, :, :, :_ROWS].clone(),
        model.kv.v[:, block, :, :_ROWS].clone(),
    ]
