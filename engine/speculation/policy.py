"""What the environment says about speculation, settled once. Reads no environment itself.

The settings read each variable once and hand down a `SpecEnv`; everything else asks the frozen
`PolicySettings` made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.reserve.decode_ring import (
    DecodeRingDecision,
    DecodeRingDepth,
    decode_rollback_ring_slots_with,
    watchdogs_disabled_from_value,
)
from engine.reserve.ladder import DEFAULT_LADDER, Ladder, mtp_ladder_drafts, parse_ladder
from engine.reserve.ssm_reserve import (
    DISPATCH_CAP,
    DISPATCH_CAP_WITHOUT_LADDER,
    MarconiSlotDecision,
    SpeculationPolicy,
    SsmRollbackMode,
    marconi_snapshot_slots_with,
    mtp_slot_draft_capacity,
    mtp_state_slots_with,
)
from engine.speculation.dcut import DCUT_MAX_SEQS


@dataclass(frozen=True, slots=True)
class SpecEnv:
    """The variables as they were set; a `bool` is presence: set to anything, also to `0`, is true.

    Attributes:
        mtp_k_ladder: ATLAS_MTP_K_LADDER.
        no_mtp_k_ladder: ATLAS_NO_MTP_K_LADDER.
        mtp_max_seqs: ATLAS_MTP_MAX_SEQS.
        mtp_pool_full_width: ATLAS_MTP_POOL_FULL_WIDTH.
        ep_protocol: ATLAS_EP_PROTOCOL.
        mtp_static_rung: ATLAS_MTP_STATIC_RUNG.
        mtp_dcut_max_seqs: ATLAS_MTP_DCUT_MAX_SEQS.
        no_mtp_dcut: ATLAS_NO_MTP_DCUT.
        ssm_marconi_full: ATLAS_SSM_MARCONI_FULL.
        ssm_decode_ring: ATLAS_SSM_DECODE_RING.
        disable_watchdogs: ATLAS_DISABLE_WATCHDOGS.
    """

    mtp_k_ladder: str | None = None
    no_mtp_k_ladder: bool = False
    mtp_max_seqs: int | None = None
    mtp_pool_full_width: bool = False
    ep_protocol: str | None = None
    mtp_static_rung: bool = False
    mtp_dcut_max_seqs: int | None = None
    no_mtp_dcut: bool = False
    ssm_marconi_full: bool = False
    ssm_decode_ring: str | None = None
    disable_watchdogs: str | None = None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a `SpecEnv` comes to; the defaults are those of an empty environment.

    Attributes:
        ladder: drafts by width, None when it is disabled.
        rung_pinned: the ladder decides at widths 9 to 16 too, no controller lifts it.
        dispatch_cap: mtp_max_seqs, the widest batch that speculates.
        full_width: every slot may speculate, each as deep as num_drafts.
        slots_pinned: slots never move (EP v2), so that there is no compaction.
        dcut_max_seqs: widest batch that D-Cut prunes, 0 for none.
        marconi_full: keep the snapshot slots though no cache fills them.
        decode_ring: the ring's override as it was set.
        watchdogs_disabled: nobody asks for a rollback of decode.
        warnings: one sentence each, to be logged once.
    """

    ladder: Ladder | None = DEFAULT_LADDER
    rung_pinned: bool = False
    dispatch_cap: int = DISPATCH_CAP
    full_width: bool = False
    slots_pinned: bool = False
    dcut_max_seqs: int = DCUT_MAX_SEQS
    marconi_full: bool = False
    decode_ring: str | None = None
    watchdogs_disabled: bool = False
    warnings: tuple[str, ...] = ()

    def ladder_drafts(self, n_active: int, num_drafts: int) -> int:
        """Drafts per sequence of a step of `n_active` decoding sequences, by the ladder alone."""
        return mtp_ladder_drafts(n_active, num_drafts, self.ladder)

    def dispatches(self, n_active: int) -> bool:
        """Whether a batch of this width speculates at all; wider ones plain-decode."""
        return n_active <= self.dispatch_cap

    def state_slots(self, max_batch_size: int) -> int:
        """`mtp_state_slots`: a sequence may be verified only in a slot below this."""
        return mtp_state_slots_with(max_batch_size, self.dispatch_cap, self.full_width)

    def slot_draft_capacity(self, slot_idx: int, num_drafts: int, rollback: SsmRollbackMode) -> int:
        """Drafts that a covered slot's verify storage holds."""
        return mtp_slot_draft_capacity(
            slot_idx,
            self.dispatch_cap,
            num_drafts,
            rollback,
            self.ladder,
            full_width=self.full_width,
        )

    def reserve_policy(self, num_drafts: int, rollback: SsmRollbackMode) -> SpeculationPolicy:
        """The part that the ledger's terms depend on."""
        return SpeculationPolicy(
            num_drafts=num_drafts,
            rollback=rollback,
            dispatch_cap=self.dispatch_cap,
            ladder=self.ladder,
            full_width=self.full_width,
        )


def resolve_policy(env: SpecEnv) -> PolicySettings:
    """Settle every variable against the others.

    A ladder that does not parse counts as not set, with a warning. A disabled ladder wins over one
    that is set, and lowers the default of `dispatch_cap` to 4, which ATLAS_MTP_MAX_SEQS overrides.

    Raises:
        ConfigError: a count below 0.
    """
    _check_count("ATLAS_MTP_MAX_SEQS", env.mtp_max_seqs)
    _check_count("ATLAS_MTP_DCUT_MAX_SEQS", env.mtp_dcut_max_seqs)
    ladder, explicit, warnings = _ladder(env)
    cap = env.mtp_max_seqs
    if cap is None:
        cap = DISPATCH_CAP if ladder is not None else DISPATCH_CAP_WITHOUT_LADDER
    dcut = DCUT_MAX_SEQS if env.mtp_dcut_max_seqs is None else env.mtp_dcut_max_seqs
    pinned = env.ep_protocol == "v2"
    return PolicySettings(
        ladder=ladder,
        rung_pinned=explicit or env.mtp_static_rung,
        dispatch_cap=cap,
        full_width=env.mtp_pool_full_width or pinned,
        slots_pinned=pinned,
        dcut_max_seqs=0 if env.no_mtp_dcut else dcut,
        marconi_full=env.ssm_marconi_full,
        decode_ring=env.ssm_decode_ring,
        watchdogs_disabled=watchdogs_disabled_from_value(env.disable_watchdogs),
        warnings=warnings,
    )


def decode_rollback_ring_slots(
    num_ssm_layers: int, use_speculative: bool, depth: DecodeRingDepth, policy: PolicySettings
) -> DecodeRingDecision:
    """Depth of the decode-rollback ring under `policy` and what was published so far."""
    return decode_rollback_ring_slots_with(
        num_ssm_layers,
        use_speculative,
        depth.published,
        policy.decode_ring,
        policy.watchdogs_disabled,
    )


def marconi_snapshot_slots(
    requested: int, prefix_caching_active: bool, policy: PolicySettings
) -> MarconiSlotDecision:
    """Snapshot slots to reserve and allocate under `policy`."""
    return marconi_snapshot_slots_with(requested, prefix_caching_active, policy.marconi_full)


def _ladder(env: SpecEnv) -> tuple[Ladder | None, bool, tuple[str, ...]]:
    """(ladder, whether it was asked for, warnings)."""
    if env.no_mtp_k_ladder:
        return None, True, ()
    if env.mtp_k_ladder is None:
        return DEFAULT_LADDER, False, ()
    parsed = parse_ladder(env.mtp_k_ladder)
    if parsed is None:
        shown = ",".join(f"{step.n_max}:{step.drafts}" for step in DEFAULT_LADDER)
        warning = (
            f"ATLAS_MTP_K_LADDER {env.mtp_k_ladder!r} is no list of n_max:drafts steps and is "
            f"ignored; the ladder is {shown}"
        )
        return DEFAULT_LADDER, False, (warning,)
    return parsed, True, ()


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise ConfigError(f"{name} is {value}; use 0 or more")
