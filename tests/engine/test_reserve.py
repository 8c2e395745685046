"""The reserve arithmetic against every vector of the specification, and its headline case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.reserve.decode_ring import (
    DecodeRingDepth,
    decode_rollback_ring_slots_with,
    fit_decode_ring_slots,
    parse_decode_ring_slots,
    watchdogs_disabled_from_value,
)
from engine.reserve.ladder import DEFAULT_LADDER, Ladder, mtp_ladder_drafts, parse_ladder
from engine.reserve.ssm_reserve import (
    SsmBlob,
    SsmRollbackMode,
    marconi_snapshot_slots_with,
    mtp_slot_draft_capacity,
    mtp_state_slots_with,
    prefix_caching_active,
    ssm_carry_ring_bytes,
    ssm_carry_row_bytes,
    ssm_h_prefill_stage_bytes,
    ssm_h_stored_bytes,
    ssm_pool_reserve_bytes,
    ssm_replay_ring_bytes,
    ssm_replay_row_bytes,
    verify_slot_drafts,
    verify_slot_h_intermediates,
)

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "vectors" / "reserve.json").read_text(encoding="utf-8")
)
GIB = 2**30
CARRY, REPLAY, SNAPSHOT = SsmRollbackMode.CARRY, SsmRollbackMode.REPLAY, SsmRollbackMode.SNAPSHOT


def cases(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for name in names for case in VECTORS[name]])


def ladder_of(case: dict[str, Any]) -> Ladder:
    return parse_ladder(case.get("ladder", "")) or DEFAULT_LADDER


def blob_of(name: str) -> SsmBlob:
    sizes = VECTORS["blob"][name]
    layers, heads, dim = sizes["gdn_layers"], sizes["value_heads"], sizes["head_dim"]
    conv_dim = 2 * sizes["key_heads"] * dim + heads * dim
    return SsmBlob(
        layers=layers,
        h_bytes=layers * heads * dim * dim * 4,
        conv_bytes=layers * conv_dim * sizes["conv_kernel"] * 4,
        conv_dim=conv_dim,
        value_dim=heads * dim,
        value_heads=heads,
    )


@pytest.mark.parametrize("name", VECTORS["blob"])
def test_blobs(name: str) -> None:
    blob, sizes = blob_of(name), VECTORS["blob"][name]
    assert blob.h_bytes == sizes["h_bytes"]
    assert blob.conv_bytes == sizes["conv_bytes_fp32_w4"]
    assert blob.nbytes == sizes["blob_bytes"]
    assert ssm_replay_row_bytes(blob.qkvz_elems, blob.value_heads) == sizes["replay_row_bytes"]


@cases("mtp_ladder_drafts", "mtp_ladder_drafts_env")
def test_mtp_ladder_drafts(case: dict[str, Any]) -> None:
    got = mtp_ladder_drafts(case["n_active"], case["num_drafts"], ladder_of(case))
    assert got == case["want"]


def test_a_disabled_ladder_gives_all_drafts_at_every_width() -> None:
    assert [mtp_ladder_drafts(n, 3, None) for n in (1, 9, 64)] == [3, 3, 3]
    assert mtp_ladder_drafts(9, 0, None) == 0


@cases("mtp_state_slots")
def test_mtp_state_slots(case: dict[str, Any]) -> None:
    got = mtp_state_slots_with(
        case["max_batch_size"], case["spec_dispatch_cap"], case["full_width"]
    )
    assert got == case["want"]


@cases("verify_slot_drafts")
def test_verify_slot_drafts(case: dict[str, Any]) -> None:
    got = verify_slot_drafts(
        case["slot_idx"], case["dispatch_cap"], case["num_drafts"], ladder_of(case)
    )
    assert got == case["want"]


def test_full_width_and_a_disabled_ladder_make_the_tiers_vacuous() -> None:
    assert verify_slot_drafts(31, 32, 3) == 1
    assert verify_slot_drafts(31, 32, 3, full_width=True) == 3
    assert verify_slot_drafts(31, 32, 3, None) == 3


def test_what_a_slot_may_verify_depends_on_the_mode() -> None:
    assert verify_slot_h_intermediates(8, 32, 3) == 1
    assert verify_slot_h_intermediates(8, 32, 3, uniform_verify=True) == 3
    got = [mtp_slot_draft_capacity(8, 32, 3, mode) for mode in (SNAPSHOT, REPLAY, CARRY)]
    assert got == [1, 3, 3]
    assert mtp_slot_draft_capacity(8, 32, 3, SNAPSHOT, full_width=True) == 3
    assert mtp_slot_draft_capacity(8, 32, 3, SNAPSHOT, uniform_verify=True) == 3


@cases("ssm_pool_reserve_bytes")
def test_ssm_pool_reserve_bytes(case: dict[str, Any]) -> None:
    blob, mode = blob_of(case["model"]), SsmRollbackMode(case["rollback"])
    pool = ssm_pool_reserve_bytes(
        blob,
        case["max_batch_size"],
        spec_on=case["spec_on"],
        num_drafts=case["num_drafts"],
        mtp_state_slots=case["mtp_state_slots"],
        rollback=mode,
        uniform_verify=case["uniform_verify"],
        h_f16_pool=case["h_f16_pool"],
    )
    row = ssm_replay_row_bytes(blob.qkvz_elems, blob.value_heads)
    ring = ssm_replay_ring_bytes(
        case["mtp_state_slots"],
        case["num_drafts"] + 1,
        blob.layers,
        row,
        spec_on=case["spec_on"],
        rollback=mode,
    )
    assert (pool, ring) == (case["want"], case["replay_ring"])


@cases("ssm_carry_ring_bytes")
def test_ssm_carry_ring_bytes(case: dict[str, Any]) -> None:
    blob = blob_of(case["model"])
    row = ssm_carry_row_bytes(blob.conv_dim, blob.value_heads, case["act_bytes"])
    assert row == case["row"]
    ring = ssm_carry_ring_bytes(case["covered"], case["num_drafts"], blob.layers, row)
    assert ring == case["want"]


@pytest.mark.parametrize("spec_on", [False, True])
def test_carry_adds_nothing_to_the_pool(spec_on: bool) -> None:
    blob = blob_of("qwen3.6-27b")
    pool = ssm_pool_reserve_bytes(
        blob, 128, spec_on=spec_on, num_drafts=3, mtp_state_slots=32, rollback=CARRY
    )
    assert pool == 128 * 158_859_264


def test_half_precision_storage() -> None:
    blob = blob_of("qwen3.6-27b")
    assert ssm_h_stored_bytes(blob.h_bytes, h_f16_pool=True) == 75_497_472
    assert ssm_h_stored_bytes(blob.h_bytes, h_f16_pool=False) == 150_994_944
    assert ssm_h_prefill_stage_bytes(blob, 128, h_f16_pool=True) == 128 * 3_145_728
    assert ssm_h_prefill_stage_bytes(blob, 128, h_f16_pool=False) == 0
    nothing = SsmBlob(0, 0, 0, 0, 0, 0)
    assert ssm_h_prefill_stage_bytes(nothing, 128, h_f16_pool=True) == 0


def test_float32_rows_of_a_replay_ring_are_twice_as_wide() -> None:
    assert ssm_replay_row_bytes(16384, 48) == 33_152
    assert ssm_replay_row_bytes(16384, 48, act_bytes=4) == 65_920


def pool_27b(max_batch_size: int, mode: SsmRollbackMode, **rest: Any) -> int:
    spec_on = rest.pop("spec_on", True)
    full_width = rest.get("full_width", False)
    return ssm_pool_reserve_bytes(
        blob_of("qwen3.6-27b"),
        max_batch_size,
        spec_on=spec_on,
        num_drafts=3,
        mtp_state_slots=mtp_state_slots_with(max_batch_size, 32, full_width),
        rollback=mode,
        **rest,
    )


@pytest.mark.parametrize(
    ("max_batch_size", "mode", "rest", "gib", "count"),
    [
        (128, SNAPSHOT, {}, 31.36, 33_671_872_512),
        (128, SNAPSHOT, {"h_f16_pool": True}, 16.73, 17_968_398_336),
        (128, REPLAY, {}, 23.67, 25_417_482_240),
        (128, REPLAY, {"h_f16_pool": True}, 12.42, 13_337_886_720),
        (128, SNAPSHOT, {"spec_on": False}, 18.94, 20_333_985_792),
        (64, SNAPSHOT, {}, 21.89, 23_504_879_616),
        (32, SNAPSHOT, {}, 17.16, 18_421_383_168),
        (128, SNAPSHOT, {"full_width": True}, 95.62, 102_676_561_920),
    ],
)
def test_pools_of_27b(
    max_batch_size: int, mode: SsmRollbackMode, rest: dict[str, bool], gib: float, count: int
) -> None:
    pool = pool_27b(max_batch_size, mode, **rest)
    assert pool == count
    assert pool / GIB == pytest.approx(gib, abs=0.006)


def kv_left_27b(mode: SsmRollbackMode) -> int:
    """Budget 0.70 of 121.7 GiB, 39.8 GiB of weights and rest, 8.9 GiB of snapshots and the like."""
    blob = blob_of("qwen3.6-27b")
    rings = {
        SNAPSHOT: 0,
        REPLAY: ssm_replay_ring_bytes(32, 4, 48, 33_152, spec_on=True, rollback=mode),
        CARRY: ssm_carry_ring_bytes(32, 3, 48, ssm_carry_row_bytes(blob.conv_dim, 48, 2)),
    }
    fixed = int(39.8 * GIB) + int(8.9 * GIB)
    return int(121.7 * GIB * 0.70) - fixed - pool_27b(128, mode) - rings[mode]


@pytest.mark.parametrize(
    ("mode", "gib", "count"),
    [
        (CARRY, 17.46, 18_750_712_054),
        (REPLAY, 12.68, 13_610_592_502),
        (SNAPSHOT, 5.13, 5_508_966_646),
    ],
)
def test_what_27b_leaves_for_kv(mode: SsmRollbackMode, gib: float, count: int) -> None:
    assert kv_left_27b(mode) == count
    assert kv_left_27b(mode) / GIB == pytest.approx(gib, abs=0.006)


def test_uniform_snapshots_of_27b_do_not_fit_at_070() -> None:
    committed = int((39.8 + 8.9) * GIB) + (128 + 32 * 5) * 158_859_264
    assert committed / GIB == pytest.approx(91.3, abs=0.05)
    assert committed / (121.7 * GIB) == pytest.approx(0.75, abs=0.005)
    assert committed > 0.70 * 121.7 * GIB


@cases("decode_rollback_ring_slots")
def test_decode_rollback_ring_slots(case: dict[str, Any]) -> None:
    got = decode_rollback_ring_slots_with(
        case["num_ssm_layers"],
        case["use_speculative"],
        case["published"],
        case["ring_override"],
        case["watchdogs_disabled"],
    )
    assert got.slots == case["want"]
    assert (got.skipped is not None) == case["skipped"]


@cases("fit_decode_ring_slots")
def test_fit_decode_ring_slots(case: dict[str, Any]) -> None:
    numbers = {name: value for name, value in case.items() if name != "want"}
    assert fit_decode_ring_slots(**numbers) == case["want"]


@cases("watchdogs_disabled_from_value")
def test_watchdogs_disabled_from_value(case: dict[str, Any]) -> None:
    assert watchdogs_disabled_from_value(case["value"]) == case["want"]


@cases("parse_decode_ring_slots")
def test_parse_decode_ring_slots(case: dict[str, Any]) -> None:
    if case.get("error"):
        with pytest.raises(ConfigError, match="neither auto nor 0 to 8"):
            parse_decode_ring_slots(case["value"])
    else:
        assert parse_decode_ring_slots(case["value"]) == case["want"]


def test_the_first_published_depth_stays() -> None:
    depth = DecodeRingDepth()
    assert depth.published is None
    assert depth.set_decode_ring_slots(2) == 2
    assert depth.set_decode_ring_slots(8) == 2
    assert depth.published == 2


@cases("marconi_snapshot_slots")
def test_marconi_snapshot_slots(case: dict[str, Any]) -> None:
    got = marconi_snapshot_slots_with(
        case["requested"], case["prefix_caching_active"], case["full_reserve"]
    )
    assert got.slots == case["want"]
    assert (got.skipped is not None) == case["skipped"]


def test_prefix_caching_needs_the_flag_and_a_state_that_can_be_restored() -> None:
    got = [prefix_caching_active(a, b) for a in (False, True) for b in (False, True)]
    assert got == [False, False, False, True]
