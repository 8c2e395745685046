"""What follows from the settings of speculation."""

from __future__ import annotations

from typing import Any

import pytest

from engine.reserve.ladder import DEFAULT_LADDER
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.capacity import UNLIMITED_CAPACITY, clamp_drafts_to_slot_capacity
from engine.speculation.policy import ControllerMode, PolicySettings
from tests.engine.speculation.vectors import cases

PINS = [
    PolicySettings(3, static_rung=True),
    PolicySettings(3, ladder_text="4:3,8:2"),
    PolicySettings(3, ladder_disabled=True),
]


@pytest.mark.parametrize("case", cases("mtp_ladder_drafts_env"))
def test_ladder_of_the_variable(case: dict[str, Any]) -> None:
    settings = PolicySettings(case["num_drafts"], ladder_text=case["ladder"])
    assert settings.ladder_drafts(case["n_active"]) == case["want"]


def test_a_ladder_that_does_not_parse_is_the_default_with_one_warning() -> None:
    settings = PolicySettings(3, ladder_text="4:three")
    assert settings.ladder == DEFAULT_LADDER
    assert not settings.ladder_explicit
    assert settings.adaptive_rung_acts
    (warning,) = settings.warnings
    assert "'4:three'" in warning
    assert "4:3,8:3,16:1,32:1" in warning


def test_disabled_wins_over_a_given_ladder() -> None:
    settings = PolicySettings(3, ladder_text="4:1", ladder_disabled=True)
    assert settings.ladder is None
    assert [settings.ladder_drafts(n) for n in (1, 9, 64)] == [3, 3, 3]
    assert len(settings.warnings) == 1
    assert PolicySettings(3, ladder_text="4:1").warnings == ()
    assert PolicySettings(3, ladder_disabled=True).warnings == ()


def test_dispatch_cap() -> None:
    assert PolicySettings(3).mtp_max_seqs == 32
    assert PolicySettings(3, ladder_disabled=True).mtp_max_seqs == 4
    assert PolicySettings(3, ladder_disabled=True, mtp_max_seqs_override=64).mtp_max_seqs == 64
    assert PolicySettings(3, mtp_max_seqs_override=0).mtp_max_seqs == 0


def test_default_widths() -> None:
    settings = PolicySettings(3)
    widths = (1, 4, 5, 8, 9, 16, 17, 32, 64)
    assert [settings.ladder_drafts(n) for n in widths] == [3, 3, 3, 3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("pinned", PINS)
def test_a_pinned_rung_stops_both_unless_the_controller_is_asked_for(
    pinned: PolicySettings,
) -> None:
    assert not pinned.adaptive_rung_acts
    assert not pinned.controller_acts
    asked = PolicySettings(
        3,
        ladder_text=pinned.ladder_text,
        ladder_disabled=pinned.ladder_disabled,
        static_rung=pinned.static_rung,
        controller=ControllerMode.ON,
    )
    assert asked.controller_acts
    assert not asked.adaptive_rung_acts


def test_controller_off_leaves_the_adaptive_rung() -> None:
    settings = PolicySettings(3, controller=ControllerMode.OFF)
    assert settings.adaptive_rung_acts
    assert not settings.controller_acts
    assert PolicySettings(3).controller_acts


def test_without_drafts_nothing_acts() -> None:
    settings = PolicySettings(0, controller=ControllerMode.ON)
    assert not settings.controller_acts
    assert not settings.adaptive_rung_acts
    assert settings.ladder_drafts(1) == 0
    assert settings.state_slots(64) == 0
    assert not PolicySettings(1).adaptive_rung_acts
    assert PolicySettings(1).controller_acts


def test_covered_slots() -> None:
    assert [PolicySettings(3).state_slots(n) for n in (1, 32, 64, 128)] == [1, 32, 32, 32]
    assert PolicySettings(3, mtp_max_seqs_override=48).state_slots(128) == 48
    assert PolicySettings(3, ladder_disabled=True).state_slots(128) == 32
    assert PolicySettings(3, pool_full_width=True).state_slots(128) == 128
    assert PolicySettings(3, pinned_slots=True).state_slots(128) == 128
    assert PolicySettings(3, recurrent=False).state_slots(128) == 128


def test_slot_capacity_by_mode() -> None:
    snapshot = PolicySettings(3, SsmRollbackMode.SNAPSHOT)
    assert [snapshot.slot_capacity(slot) for slot in (0, 7, 8, 31)] == [3, 3, 1, 1]
    assert PolicySettings(3, SsmRollbackMode.REPLAY).slot_capacity(31) == 3
    assert PolicySettings(3).slot_capacity(31) == 3
    full = PolicySettings(3, SsmRollbackMode.SNAPSHOT, pool_full_width=True)
    assert full.slot_capacity(99) == 3
    free = PolicySettings(3, SsmRollbackMode.SNAPSHOT, recurrent=False)
    assert free.slot_capacity(31) == UNLIMITED_CAPACITY


@pytest.mark.parametrize("width", range(9, 33))
def test_tiered_pools_clamp_every_lift_from_nine_sequences_on(width: int) -> None:
    snapshot = PolicySettings(3, SsmRollbackMode.SNAPSHOT)
    capacities = [snapshot.slot_capacity(slot) for slot in range(width)]
    assert clamp_drafts_to_slot_capacity(2, capacities) == 1


def test_dcut_width() -> None:
    assert PolicySettings(3).dcut_width_cap == 8
    assert PolicySettings(3, dcut_max_seqs=4).dcut_width_cap == 4
    assert PolicySettings(3, dcut_max_seqs=4, dcut_off=True).dcut_width_cap == 0


def test_the_reserve_gets_the_same_numbers() -> None:
    settings = PolicySettings(
        2, SsmRollbackMode.REPLAY, "8:2", mtp_max_seqs_override=40, pool_full_width=True
    )
    reserve = settings.reserve
    assert (reserve.num_drafts, reserve.dispatch_cap, reserve.full_width) == (2, 40, True)
    assert reserve.rollback is SsmRollbackMode.REPLAY
    assert reserve.ladder == settings.ladder
