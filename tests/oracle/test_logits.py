"""Logits of our ragged forward against transformers, float32, for every way to cut the work."""

from __future__ import annotations

import pytest
import torch

from engine.model.hybrid import HybridModel
from engine.runner import RowPhase
from tests.oracle.checkpoints import VOCAB, Oracle
from tests.oracle.ours import run, segment, split_prompt

TOLERANCE = 3e-4


def prompt(length: int, seed: int = 1) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(3, VOCAB, (length,), generator=g)]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 77, 130])
def test_whole_prompt(oracle: Oracle, model: HybridModel, length: int) -> None:
    ids = prompt(length)
    got = model.forward([segment(2, 0, ids, RowPhase.PREFILL)]).logits
    assert_close(got, oracle.logits(ids))


@pytest.mark.parametrize(
    "sizes",
    [[64, 13], [1] * 3 + [74], [7] * 11, [33, 40, 4], [65, 12], [64, 1, 12]],
    ids=lambda sizes: "-".join(map(str, sizes[:4])),
)
def test_prompt_in_chunks(oracle: Oracle, model: HybridModel, sizes: list[int]) -> None:
    ids = prompt(77)
    assert_close(run(model, split_prompt(0, ids, sizes)), oracle.logits(ids))


def test_token_by_token(oracle: Oracle, model: HybridModel) -> None:
    ids = prompt(70)
    parts = [segment(1, 0, ids[:5], RowPhase.PREFILL)]
    parts += [segment(1, i, [ids[i]], RowPhase.DECODE) for i in range(5, 70)]
    assert_close(run(model, parts), oracle.logits(ids))


def test_ragged_batch_of_prefill_decode_and_verify_rows(oracle: Oracle, model: HybridModel) -> None:
    a, b, c, d = prompt(40, 1), prompt(66, 2), prompt(129, 3), prompt(7, 4)
    for slot, ids, start in ((0, a, 39), (1, b, 62), (2, c, 64)):
        model.forward([segment(slot, 0, ids[:start], RowPhase.PREFILL)])
    got = model.forward(
        [
            segment(1, 62, b[62:], RowPhase.DECODE, committed=1),
            segment(3, 0, d, RowPhase.PREFILL),
            segment(0, 39, a[39:], RowPhase.DECODE),
            segment(2, 64, c[64:], RowPhase.PREFILL, logit_rows=3),
        ]
    ).logits
    want = torch.cat(
        [
            oracle.logits(b)[62:],
            oracle.logits(d),
            oracle.logits(a)[39:],
            oracle.logits(c)[-3:],
        ]
    )
    assert_close(got, want)


def test_rejected_rows_leave_no_trace(oracle: Oracle, model: HybridModel) -> None:
    ids = prompt(30)
    model.forward([segment(0, 0, ids[:20], RowPhase.PREFILL)])
    wrong = [ids[20], ids[21], 3, 4]
    model.forward([segment(0, 20, wrong, RowPhase.DECODE, committed=1)])
    # One draft was right: row 1 is pending, and the next step begins at position 22.
    model.states.pending[0] = 1
    got = [model.forward([segment(0, 22, ids[22:26], RowPhase.DECODE, committed=1)]).logits]
    model.states.pending[0] = 3
    got.append(model.forward([segment(0, 26, ids[26:], RowPhase.DECODE)]).logits)
    assert_close(torch.cat(got), oracle.logits(ids)[22:])
