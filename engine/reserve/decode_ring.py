"""Depth of the decode-rollback ring: who decides it, and which depth fits. Reads no environment."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import ConfigError

DECODE_RING_FIT_LADDER = (8, 4, 2, 1, 0)
_DEEPEST = DECODE_RING_FIT_LADDER[0]


@dataclass(frozen=True, slots=True)
class DecodeRingDecision:
    """Slots per sequence; `skipped` says why it is none although the model has GDN layers."""

    slots: int
    skipped: str | None = None


class DecodeRingDepth:
    """The published depth: the first write wins, later ones are told what is in force."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: int | None = None

    @property
    def published(self) -> int | None:
        """The depth in force, or None when nobody decided."""
        return self._slots

    def set_decode_ring_slots(self, slots: int) -> int:
        """Publish `slots` unless a depth is in force; returns the one in force."""
        if self._slots is None:
            self._slots = slots
        return self._slots


def decode_rollback_ring_slots_with(
    num_ssm_layers: int,
    use_speculative: bool,
    published: int | None,
    ring_override: str | None,
    watchdogs_disabled: bool,
) -> DecodeRingDecision:
    """The first rule that applies decides.

    Args:
        num_ssm_layers: GDN layers; without any there is nothing to roll back.
        use_speculative: the watchdogs roll back plain decode only.
        published: an explicit depth, or the one that preflight fitted.
        ring_override: ATLAS_SSM_DECODE_RING; `1` and `0` count, other values do not.
        watchdogs_disabled: nobody would ask for a rollback.
    """
    if num_ssm_layers == 0:
        return DecodeRingDecision(0)
    if published is not None:
        return DecodeRingDecision(published)
    if ring_override in ("0", "1"):
        return DecodeRingDecision(_DEEPEST if ring_override == "1" else 0)
    if use_speculative:
        return DecodeRingDecision(0, "speculation is on, and watchdogs roll back plain decode only")
    if watchdogs_disabled:
        return DecodeRingDecision(0, "watchdogs are off, so that nothing asks for a rollback")
    return DecodeRingDecision(_DEEPEST)


def watchdogs_disabled_from_value(value: str | None) -> bool:
    """ATLAS_DISABLE_WATCHDOGS: `1` or `true` in any case, blanks around it ignored."""
    return value is not None and value.strip().lower() in ("1", "true")


def parse_decode_ring_slots(value: str) -> int | None:
    """`auto` (None: fitted at preflight) or a depth of 0 to 8.

    Raises:
        ConfigError: anything else.
    """
    if value == "auto":
        return None
    if re.fullmatch(r"[0-9]+", value) and int(value) <= _DEEPEST:
        return int(value)
    raise ConfigError(f"--ssm-decode-ring-slots {value!r} is neither auto nor 0 to {_DEEPEST}")


def fit_decode_ring_slots(
    start_slots: int, reserve_without_ring: int, bytes_per_ring_slot: int, free_mem: int
) -> int:
    """The deepest rung up to `start_slots` whose ring fits beside the rest; 0 if none does.

    Args:
        start_slots: depth to begin with.
        reserve_without_ring: bytes of everything else.
        bytes_per_ring_slot: one snapshot of every sequence, max_batch_size stored blobs.
        free_mem: bytes that will be left after the weights, not before.
    """
    for rung in DECODE_RING_FIT_LADDER:
        if rung <= start_slots and reserve_without_ring + rung * bytes_per_ring_slot <= free_mem:
            return rung
    return 0
