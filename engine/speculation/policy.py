"""The settings of speculation and what follows from them. Reads no environment: values come in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.reserve.ladder import DEFAULT_LADDER, Ladder, mtp_ladder_drafts, parse_ladder
from engine.reserve.ssm_reserve import (
    DISPATCH_CAP,
    DISPATCH_CAP_WITHOUT_LADDER,
    SpeculationPolicy,
    SsmRollbackMode,
    mtp_slot_draft_capacity,
)
from engine.speculation.capacity import UNLIMITED_CAPACITY
from engine.speculation.dcut import DCUT_MAX_SEQS


class ControllerMode(StrEnum):
    """Whether the cost-aware controller picks the depth: AUTO is on unless something is pinned."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Flags and variables of speculation as the user gave them; the properties derive the rules.

    Attributes:
        num_drafts: per sequence at most, 0 for no speculation.
        rollback: see SsmRollbackMode.
        ladder_text: ATLAS_MTP_K_LADDER, None when not set.
        ladder_disabled: ATLAS_NO_MTP_K_LADDER is present.
        mtp_max_seqs_override: ATLAS_MTP_MAX_SEQS, None when not set.
        static_rung: ATLAS_MTP_STATIC_RUNG is present.
        pool_full_width: ATLAS_MTP_POOL_FULL_WIDTH is present.
        pinned_slots: ATLAS_EP_PROTOCOL is v2, which never moves a sequence.
        dcut_max_seqs: ATLAS_MTP_DCUT_MAX_SEQS, or its default.
        dcut_off: ATLAS_NO_MTP_DCUT is present.
        controller: `--spec-controller`.
        recurrent: the model has GDN layers, whose slots bound what can be verified.
        uniform_verify: a drafter whose width does not follow the ladder (DFlash).
    """

    num_drafts: int = 0
    rollback: SsmRollbackMode = SsmRollbackMode.CARRY
    ladder_text: str | None = None
    ladder_disabled: bool = False
    mtp_max_seqs_override: int | None = None
    static_rung: bool = False
    pool_full_width: bool = False
    pinned_slots: bool = False
    dcut_max_seqs: int = DCUT_MAX_SEQS
    dcut_off: bool = False
    controller: ControllerMode = ControllerMode.AUTO
    recurrent: bool = True
    uniform_verify: bool = False

    @property
    def ladder(self) -> Ladder | None:
        """Drafts by width; None when disabled, the default for a text that does not parse."""
        if self.ladder_disabled:
            return None
        parsed = None if self.ladder_text is None else parse_ladder(self.ladder_text)
        return DEFAULT_LADDER if parsed is None else parsed

    @property
    def ladder_explicit(self) -> bool:
        """A ladder was given and is in force; one that does not parse counts as not given."""
        return (
            not self.ladder_disabled
            and self.ladder_text is not None
            and parse_ladder(self.ladder_text) is not None
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was given and does not count, one sentence each."""
        if self.ladder_text is None:
            return ()
        if self.ladder_disabled:
            return ("ATLAS_NO_MTP_K_LADDER is set, so that ATLAS_MTP_K_LADDER is not used",)
        if self.ladder_explicit:
            return ()
        default = ",".join(f"{step.n_max}:{step.drafts}" for step in DEFAULT_LADDER)
        return (
            f"ATLAS_MTP_K_LADDER={self.ladder_text!r} is not a list of n_max:drafts, "
            f"so that the default {default} is used",
        )

    @property
    def mtp_max_seqs(self) -> int:
        """The widest batch that speculates."""
        if self.mtp_max_seqs_override is not None:
            return self.mtp_max_seqs_override
        return DISPATCH_CAP_WITHOUT_LADDER if self.ladder_disabled else DISPATCH_CAP

    @property
    def full_width(self) -> bool:
        """Every slot may speculate: asked for, or because no sequence is ever moved."""
        return self.pool_full_width or self.pinned_slots

    @property
    def dcut_width_cap(self) -> int:
        """The widest batch that D-Cut prunes, 0 when it is off."""
        return 0 if self.dcut_off else self.dcut_max_seqs

    @property
    def rung_pinned(self) -> bool:
        """The depth was chosen by hand: static rung, explicit ladder, or no ladder at all."""
        return self.static_rung or self.ladder_explicit or self.ladder_disabled

    @property
    def adaptive_rung_acts(self) -> bool:
        """Whether accept statistics may lift the rung of widths 9 to 16."""
        return self.num_drafts >= 2 and not self.rung_pinned

    @property
    def controller_acts(self) -> bool:
        """Whether measured throughput picks the depth; a pinned rung yields only to ON."""
        if self.num_drafts == 0 or self.controller is ControllerMode.OFF:
            return False
        return self.controller is ControllerMode.ON or not self.rung_pinned

    @property
    def reserve(self) -> SpeculationPolicy:
        """The part that sizes the pools."""
        return SpeculationPolicy(
            self.num_drafts, self.rollback, self.mtp_max_seqs, self.ladder, self.full_width
        )

    def ladder_drafts(self, n_active: int) -> int:
        """Drafts per sequence by the ladder alone."""
        return mtp_ladder_drafts(n_active, self.num_drafts, self.ladder)

    def state_slots(self, max_batch_size: int) -> int:
        """Slots below this number may speculate; all of them without recurrent state."""
        return self.reserve.covered(max_batch_size) if self.recurrent else max_batch_size

    def slot_capacity(self, slot: int) -> int:
        """Drafts that a covered slot can verify."""
        if not self.recurrent:
            return UNLIMITED_CAPACITY
        return mtp_slot_draft_capacity(
            slot,
            self.mtp_max_seqs,
            self.num_drafts,
            self.rollback,
            self.ladder,
            uniform_verify=self.uniform_verify,
            full_width=self.full_width,
        )
