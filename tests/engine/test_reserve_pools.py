"""The ledger's exact terms against pools that were really allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import DoesNotFitError, InvariantError
from engine.model.layers import rotary_tables
from engine.pools.allocate import allocate_pools, pool_terms
from engine.reserve.decode_ring_fit import decode_ring_slots
from engine.reserve.plan import read_model
from engine.reserve.preflight import Preflight, preflight_reserve
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode
from engine.reserve.verify_terms import DECODE_RING, decode_ring_slot_bytes
from engine.speculation.policy import PolicySettings

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


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("mode", list(SsmRollbackMode))
def test_a_float16_pool_takes_half_for_h_and_a_stage(drafts: int, mode: SsmRollbackMode) -> None:
    model = read_model(TINY)
    policy = SpeculationPolicy(drafts, mode)
    ledgers = {}
    for half in (False, True):
        config = EngineConfig(
            "model",
            max_batch_size=6,
            max_seq_len=300,
            snapshot_slots=3,
            decode_ring_slots=2,
            h_f16_pool=half,
        )
        found = preflight_reserve(model, config, budget=2**30, weights_bytes=1, policy=policy)
        pools = allocate_pools(model, config, policy, found.kv_blocks, torch.float32, ring_slots=2)
        rotary = sum(table.nbytes for table in rotary_tables(model, config.max_seq_len))
        allocated = pool_terms(config, policy, pools, rotary)
        found.ledger.check_allocated(allocated)
        assert sum(allocated.values()) == found.ledger.exact
        ledgers[half] = found.ledger
    layers = model.gdn_layers
    h = model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
    saved = ledgers[False].bytes_of("state_pool") - ledgers[True].bytes_of("state_pool")
    assert saved == 6 * layers * h * 2
    assert ledgers[True].bytes_of("state_stage") == 6 * h * 4
    for name in ("snapshots", "decode_ring"):
        assert ledgers[True].bytes_of(name) < ledgers[False].bytes_of(name)


@pytest.mark.parametrize(("batch", "depth"), [(1, 1), (5, 8), (40, 3), (5, 0)])
def test_the_decode_ring_takes_what_was_reserved(batch: int, depth: int) -> None:
    model = read_model(TINY)
    config = EngineConfig("model", max_batch_size=batch, max_seq_len=300, decode_ring_slots=depth)
    policy = SpeculationPolicy()
    found = preflight_reserve(model, config, budget=2**30, weights_bytes=1)
    pools = allocate_pools(model, config, policy, found.kv_blocks, torch.float32, ring_slots=depth)
    rotary = sum(table.nbytes for table in rotary_tables(model, config.max_seq_len))
    found.ledger.check_allocated(pool_terms(config, policy, pools, rotary))
    assert pools.decode_ring.places == batch * depth
    blob = pools.states.blob_bytes
    assert pools.decode_ring.nbytes == batch * depth * blob
    names = [term.name for term in found.ledger.terms]
    assert (DECODE_RING in names) is (depth > 0)


def fit(batch: int, budget: int, **fields: object) -> tuple[int, str | None, int]:
    """Depth, why it is none, and the KV blocks that it leaves."""
    model = read_model(TINY)
    config = EngineConfig("model", max_batch_size=batch, max_seq_len=300, **fields)  # type: ignore[arg-type]

    def reserve(slots: int) -> Preflight:
        return preflight_reserve(
            model,
            replace(config, decode_ring_slots=slots),
            budget=budget,
            weights_bytes=10_000_000,
            policy=SpeculationPolicy(3 if config.speculation else 0),
        )

    decision = decode_ring_slots(model, config, reserve)
    return decision.slots, decision.skipped, reserve(decision.slots).kv_blocks


def test_who_decides_the_depth_of_the_ring() -> None:
    plenty = 4 * 2**30
    speculation = PolicySettings(num_drafts=3)
    assert fit(8, plenty)[:2] == (0, "watchdogs are off, so that nothing asks for a rollback")
    assert fit(8, plenty, watchdogs=True)[:2] == (8, None)
    depth, why, _ = fit(8, plenty, watchdogs=True, speculation=speculation)
    assert (depth, why) == (0, "speculation is on, and watchdogs roll back plain decode only")
    for fields in ({}, {"watchdogs": True, "speculation": speculation}):
        assert fit(8, plenty, decode_ring_slots=3, **fields)[:2] == (3, None)
        assert fit(8, plenty, decode_ring_override="1", **fields)[:2] == (8, None)
        assert fit(8, plenty, decode_ring_override="0", **fields)[:2] == (0, None)


def test_the_depth_is_what_fits_after_the_weights_and_half_of_the_kv_pool() -> None:
    model = read_model(TINY)
    config = EngineConfig("model", max_batch_size=8, max_seq_len=300)
    step = decode_ring_slot_bytes(model, config)
    full = preflight_reserve(model, config, budget=4 * 2**30, weights_bytes=10_000_000)
    half = full.ledger.total - full.ledger.bytes_of("kv_pool") // 2
    depths = {n: fit(8, half + n * step, watchdogs=True) for n in (0, 1, 2, 3, 4, 7, 8, 20)}
    assert {n: depth for n, (depth, _, _) in depths.items() if n > 7} == {8: 8, 20: 8}
    for n, (depth, why, blocks) in depths.items():
        assert depth in (8, 4, 2, 1, 0)
        assert depth <= max(n, 1) or depth * step <= n * step + full.ledger.bytes_of("kv_pool") // 2
        assert blocks >= full.kv_blocks // 4
        assert (why is None) is (depth > 0)
    ordered = [depth for depth, _, _ in depths.values()]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) > 2


def test_an_explicit_depth_is_never_shrunk() -> None:
    model = read_model(TINY)
    config = EngineConfig("model", max_batch_size=8, max_seq_len=300)
    least = preflight_reserve(model, config, budget=4 * 2**30, weights_bytes=10_000_000).ledger
    with pytest.raises(DoesNotFitError, match=r"--ssm-decode-ring-slots [0-7]\b"):
        fit(8, least.total, watchdogs=True, decode_ring_slots=8)
