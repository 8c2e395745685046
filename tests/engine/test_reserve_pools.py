"""The ledger's exact terms against pools that were really allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvariantError
from engine.model.layers import rotary_tables
from engine.pools.kv import KvPool
from engine.pools.shapes import kv_pool_shapes, state_pool_shapes
from engine.pools.state import SsmStatePool
from engine.reserve.plan import read_model
from engine.reserve.preflight import preflight_reserve
from engine.reserve.terms import allocated_terms
from engine.reserve.verify_terms import SpeculationPolicy

TINY = Path(__file__).resolve().parents[2] / "spark_server" / "assets" / "spark-tiny"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_reserve_and_allocation_are_equal(dtype: str, drafts: int) -> None:
    model = read_model(TINY)
    config = EngineConfig("model", dtype=dtype, max_batch_size=5, max_seq_len=300)
    ring_slots = SpeculationPolicy(drafts).ring_slots(config.max_batch_size)
    found = preflight_reserve(
        model,
        config,
        budget=2**30,
        weights_bytes=1,
        with_mtp=drafts > 0,
        drafts=drafts,
        ring_slots=ring_slots,
    )
    cpu = torch.device("cpu")
    shapes = state_pool_shapes(model, 5, ring_slots=ring_slots, drafts=drafts)
    states = SsmStatePool(shapes, cpu)
    kv = KvPool(
        kv_pool_shapes(model, found.kv_blocks, with_mtp=drafts > 0), getattr(torch, dtype), cpu
    )
    ring = states.ring_inputs.nbytes + states.ring_gates.nbytes
    allocated = allocated_terms(
        config,
        state_bytes=states.nbytes - ring,
        ring_bytes=ring,
        ring_slots=ring_slots,
        kv_bytes=kv.nbytes,
        kv_blocks=kv.blocks,
        rotary_bytes=sum(table.nbytes for table in rotary_tables(model, config.max_seq_len)),
    )
    found.ledger.check_allocated(allocated)
    assert sum(allocated.values()) == found.ledger.exact
    with pytest.raises(InvariantError, match="kv_pool"):
        found.ledger.check_allocated(allocated | {"kv_pool": allocated["kv_pool"] + 4})
