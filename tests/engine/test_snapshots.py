"""Copies of single slots' states: exact, apart from each other, and as large as reserved."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvariantError
from engine.pools.shapes import state_pool_shapes, verify_pool_shapes
from engine.pools.snapshots import StateSnapshots
from engine.pools.state import SsmStatePool
from engine.reserve.ssm_reserve import SpeculationPolicy
from engine.reserve.verify_terms import snapshot_terms
from engine.weights.model_config import ModelConfig, parse_config
from tests.engine.tiny_weights import text_config

SLOTS = 3


@pytest.fixture
def model() -> ModelConfig:
    return parse_config(text_config("qwen3_5"))


@pytest.fixture
def states(model: ModelConfig) -> SsmStatePool:
    shapes = state_pool_shapes(model, SLOTS, ring_slots=SLOTS + 1, drafts=2)
    pool = SsmStatePool(shapes, verify_pool_shapes(model, 0), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    pool.h.copy_(torch.randn(pool.h.shape, generator=generator))
    pool.conv.copy_(torch.randn(pool.conv.shape, generator=generator))
    return pool


def test_a_copy_comes_back_into_any_slot_and_touches_no_other(states: SsmStatePool) -> None:
    snapshots = StateSnapshots(states, 2)
    h, conv = states.h.clone(), states.conv.clone()
    snapshots.save(0, 1)
    snapshots.save(2, 0)
    states.h[:, 0] = 7.0
    states.conv[:, 0] = 7.0
    states.pending[1] = 2
    snapshots.load(1, 1)
    assert torch.equal(states.h[:, 1], h[:, 0])
    assert torch.equal(states.conv[:, 1], conv[:, 0])
    assert states.pending[1] == 0
    snapshots.load(0, 0)
    assert torch.equal(states.h[:, 0], h[:, 2])
    assert torch.equal(states.h[:, 2:], h[:, 2:])
    assert torch.equal(states.conv[:, 2:], conv[:, 2:])


def test_a_state_behind_its_pending_rows_is_not_copied(states: SsmStatePool) -> None:
    snapshots = StateSnapshots(states, 1)
    states.pending[1] = 1
    with pytest.raises(InvariantError, match="slot 1 has 1 pending rows"):
        snapshots.save(1, 0)


@pytest.mark.parametrize("places", [0, 1, 16])
def test_bytes_are_those_of_the_ledger(
    model: ModelConfig, states: SsmStatePool, places: int
) -> None:
    snapshots = StateSnapshots(states, places)
    assert snapshots.places == places
    terms = snapshot_terms(model, EngineConfig("x", snapshot_slots=places), SpeculationPolicy())
    assert snapshots.nbytes == sum(t.bytes for t in terms) == places * states.blob_bytes


def test_moved_bytes_are_counted(states: SsmStatePool) -> None:
    snapshots = StateSnapshots(states, 1)
    snapshots.save(0, 0)
    snapshots.load(0, 1)
    assert states.bytes_moved == 4 * states.blob_bytes
