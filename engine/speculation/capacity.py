"""What the slots of a step can hold, and how a lone sequence is verified. Knows no pool."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

# Capacity of a model without GDN layers: there is no verify storage that could overflow.
UNLIMITED_CAPACITY = sys.maxsize
# From this many drafts on there is no arm of a fixed width.
_WIDE_DRAFTS = 4


class SerialArm(Enum):
    """The form of a verify of one sequence: K rows for K - 1 drafts, or any number of rows."""

    K2 = "K2"
    K3 = "K3"
    K4 = "K4"
    KN = "KN"
    DFLASH = "DFLASH"


class SerialPlan(NamedTuple):
    """Drafts that are kept of the pending ones, and the arm that verifies them."""

    kept: int
    arm: SerialArm


def clamp_drafts_to_slot_capacity(drafts: int, capacities: Iterable[int]) -> int:
    """The step's drafts, cut to the smallest capacity among the slots that it verifies.

    Args:
        drafts: what ladder and controller ask for.
        capacities: per covered slot, UNLIMITED_CAPACITY without GDN layers; sequences that only
            plain-decode have none.
    """
    return min((drafts, *capacities))


def serial_verify_plan(pending: int, step_drafts: int, dflash: bool) -> SerialPlan:
    """How many of one sequence's pending drafts are verified, and by which arm.

    Args:
        pending: drafts that the sequence carries, maybe from a step of another width.
        step_drafts: this step's draft count after the clamp; a DFlash drafter ignores it.
        dflash: the serve runs a DFlash drafter.
    """
    kept = pending if dflash else min(pending, step_drafts)
    if kept >= _WIDE_DRAFTS:
        return SerialPlan(kept, SerialArm.DFLASH if dflash else SerialArm.KN)
    rows = min(kept, step_drafts)
    arms = {3: SerialArm.K4, 2: SerialArm.K3}
    return SerialPlan(kept, arms.get(rows, SerialArm.K2))
