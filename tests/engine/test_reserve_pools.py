"""The ledger's exact terms against pools that were really allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvariantError
from engine.model.layers import rotary_tables
from engine.pools.allocate import allocate_pools, pool_terms
from engine.reserve.plan import read_model
from engine.reserve.preflight import preflight_reserve
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode

TINY = Path(__file__).resolve().parents[2] / "spark_server" / "assets" / "spark-tiny"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("mode", list(SsmRollbackMode))
@pytest.mark.parametrize(("batch", "snapshots"), [(5, 3), (40, 0)])
def test_reserve_and_allocation_are_equal(
    dtype: str, drafts: int, mode: SsmRollbackMode, batch: int, snapshots: int
) -> None:
    model = read_model(TINY)
    config = EngineConfig(
        "model", dtype=dtype, max_batch_size=batch, max_seq_len=300, snapshot_slots=snapshots
    )
    policy = SpeculationPolicy(drafts, mode)
    found = preflight_reserve(
        model,
        config,
        budget=2**30,
        weights_bytes=1,
        policy=policy,
    )
    pools = allocate_pools(model, config, policy, found.kv_blocks, getattr(torch, dtype))
    rotary = sum(table.nbytes for table in rotary_tables(model, config.max_seq_len))
    allocated = pool_terms(config, policy, pools, rotary)
    found.ledger.check_allocated(allocated)
    assert sum(allocated.values()) == found.ledger.exact
    with pytest.raises(InvariantError, match="kv_pool"):
        found.ledger.check_allocated(allocated | {"kv_pool": allocated["kv_pool"] + 4})
