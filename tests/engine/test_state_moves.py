"""What the state pool copies when a sequence changes its slot, and through which operator."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.pools.shapes import state_pool_shapes, verify_pool_shapes
from engine.pools.state import SsmStatePool
from engine.weights.model_config import parse_config
from kernels.moves.naive import move_rows
from tests.engine.tiny_weights import text_config

SLOTS = 3


class Recorder:
    """move_rows that remembers how many tensors each call took."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], src: Tensor, dst: Tensor
    ) -> None:
        self.calls.append(len(sources))
        move_rows(sources, targets, src, dst)


def pool(drafts: int, recorder: Recorder) -> SsmStatePool:
    model = parse_config(text_config("qwen3_5"))
    ring_slots = SLOTS + 1 if drafts else 0
    shapes = state_pool_shapes(model, SLOTS, ring_slots=ring_slots, drafts=drafts)
    states = SsmStatePool(
        shapes, verify_pool_shapes(model, 0), torch.device("cpu"), move_rows=recorder
    )
    generator = torch.Generator().manual_seed(1)
    for tensor in (states.h, states.conv, states.ring_inputs, states.ring_gates):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return states


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_move_takes_the_state_and_the_pending_rows_in_one_call(rows: int) -> None:
    recorder = Recorder()
    states = pool(2, recorder)
    h, ring, gates = states.h.clone(), states.ring_inputs.clone(), states.ring_gates.clone()
    states.pending[2] = rows
    states.move(2, 0)
    assert recorder.calls == [4 if rows else 2]
    assert torch.equal(states.h[:, 0], h[:, 2])
    assert torch.equal(states.h[:, 1:], h[:, 1:])
    assert torch.equal(states.ring_inputs[:, 0, :rows], ring[:, 2, :rows])
    assert torch.equal(states.ring_inputs[:, 0, rows:], ring[:, 0, rows:])
    assert torch.equal(states.ring_gates[:, 0, :rows], gates[:, 2, :rows])
    assert states.pending.tolist() == [rows, 0, 0, 0]


@pytest.mark.parametrize(("drafts", "calls"), [(0, [2]), (1, [2, 4]), (3, [2, 4])])
def test_the_warm_up_runs_every_kind_of_move_and_changes_nothing(
    drafts: int, calls: list[int]
) -> None:
    recorder = Recorder()
    states = pool(drafts, recorder)
    before = [t.clone() for t in (states.h, states.conv, states.ring_inputs, states.ring_gates)]
    states.bytes_moved = 5
    states.warm_up()
    assert recorder.calls == calls
    after = (states.h, states.conv, states.ring_inputs, states.ring_gates)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not states.pending.any()
    assert states.bytes_moved == 5
