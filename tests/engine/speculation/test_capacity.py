"""What a step may verify."""

from __future__ import annotations

from typing import Any

import pytest

from engine.speculation.capacity import (
    UNLIMITED_CAPACITY,
    clamp_drafts_to_slot_capacity,
    serial_verify_plan,
)
from tests.engine.speculation.vectors import cases


@pytest.mark.parametrize("case", cases("clamp_drafts_to_slot_capacity"))
def test_clamp(case: dict[str, Any]) -> None:
    assert clamp_drafts_to_slot_capacity(case["drafts"], case["capacities"]) == case["want"]


def test_unlimited_capacity_does_not_clamp() -> None:
    assert clamp_drafts_to_slot_capacity(7, [UNLIMITED_CAPACITY] * 3) == 7


@pytest.mark.parametrize("case", cases("serial_verify_plan"))
def test_serial_verify_plan(case: dict[str, Any]) -> None:
    kept, arm = serial_verify_plan(case["pending"], case["step_drafts"], case["dflash"])
    assert [kept, arm.value] == case["want"]
