"""Bytes of the recurrent state and of what speculation adds to it; one function per term.

The preflight and the allocators call the same functions, so that they cannot disagree. Every number
comes in as an argument: no environment, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.reserve.ladder import DEFAULT_LADDER, Ladder, mtp_ladder_drafts
from engine.weights.model_config import ModelConfig

# The widest batched verify: the state slots that verify pools cover whatever the cap is.
VERIFY_WY_TABLE_SEQS = 32
# mtp_max_seqs by default, with the ladder and without.
DISPATCH_CAP = 32
DISPATCH_CAP_WITHOUT_LADDER = 4
_FLOAT32 = 4
_FLOAT16 = 2


class SsmRollbackMode(StrEnum):
    """How a verify step gets rid of the state of rejected rows.

    SNAPSHOT: every verified row writes its state. REPLAY: a checkpoint and the rows' inputs.
    CARRY: accepted rows are folded in by the next step, so that nothing is ever undone.
    """

    SNAPSHOT = "snapshot"
    REPLAY = "replay"
    CARRY = "carry"


@dataclass(frozen=True, slots=True)
class SsmBlob:
    """One sequence's state over all GDN layers, in float32 bytes, and the sizes behind it."""

    layers: int
    h_bytes: int
    conv_bytes: int
    conv_dim: int
    value_dim: int
    value_heads: int

    @property
    def nbytes(self) -> int:
        """Bytes of h and conv."""
        return self.h_bytes + self.conv_bytes

    @property
    def qkvz_elems(self) -> int:
        """Channels of one row's q, k, v and z."""
        return self.conv_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class MarconiSlotDecision:
    """Snapshot slots to reserve; `skipped` says why it is none although some were asked for."""

    slots: int
    skipped: str | None = None


def ssm_blob(model: ModelConfig) -> SsmBlob:
    """h [Hv, Dk, Dv] and conv [conv_dim, kernel] per layer, both float32 and of full width."""
    layers, heads = model.gdn_layers, model.linear_num_value_heads
    state = heads * model.linear_key_head_dim * model.linear_value_head_dim
    return SsmBlob(
        layers=layers,
        h_bytes=layers * state * _FLOAT32,
        conv_bytes=layers * model.conv_dim * model.linear_conv_kernel_dim * _FLOAT32,
        conv_dim=model.conv_dim,
        value_dim=model.value_dim,
        value_heads=heads,
    )


def mtp_state_slots_with(max_batch_size: int, spec_dispatch_cap: int, full_width: bool) -> int:
    """State slots that may speculate: those below this number.

    Preflight, the state pool and the scheduler's gate must all ask here.
    """
    if full_width:
        return max_batch_size
    return min(max_batch_size, max(spec_dispatch_cap, VERIFY_WY_TABLE_SEQS))


def verify_slot_drafts(
    slot_idx: int,
    dispatch_cap: int,
    num_drafts: int,
    ladder: Ladder | None = DEFAULT_LADDER,
    *,
    full_width: bool = False,
) -> int:
    """Drafts that slot `slot_idx` may ever verify.

    A slot is in use only when more than `slot_idx` sequences run: the largest ladder count over
    widths slot_idx + 1 .. max(dispatch_cap, slot_idx + 1).
    """
    if full_width:
        return num_drafts
    widths = range(slot_idx + 1, max(dispatch_cap, slot_idx + 1) + 1)
    return max(mtp_ladder_drafts(width, num_drafts, ladder) for width in widths)


def verify_slot_h_intermediates(
    slot_idx: int,
    dispatch_cap: int,
    num_drafts: int,
    ladder: Ladder | None = DEFAULT_LADDER,
    *,
    uniform_verify: bool = False,
    full_width: bool = False,
) -> int:
    """H states that snapshot mode keeps for the slot: K - 1 of a verify of K rows.

    `uniform_verify` is a drafter whose width does not follow the ladder (DFlash).
    """
    if uniform_verify:
        return num_drafts
    return verify_slot_drafts(slot_idx, dispatch_cap, num_drafts, ladder, full_width=full_width)


def mtp_slot_draft_capacity(
    slot_idx: int,
    dispatch_cap: int,
    num_drafts: int,
    rollback: SsmRollbackMode,
    ladder: Ladder | None = DEFAULT_LADDER,
    *,
    uniform_verify: bool = False,
    full_width: bool = False,
) -> int:
    """Drafts that a step may verify in the slot: rings are uniform, snapshots are tiered."""
    if rollback is not SsmRollbackMode.SNAPSHOT:
        return num_drafts
    return verify_slot_h_intermediates(
        slot_idx,
        dispatch_cap,
        num_drafts,
        ladder,
        uniform_verify=uniform_verify,
        full_width=full_width,
    )


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """What decides how much state speculation needs; defaults as in the settings.

    Attributes:
        num_drafts: per sequence at most, 0 for no speculation.
        rollback: see SsmRollbackMode.
        dispatch_cap: mtp_max_seqs.
        ladder: drafts by width, None when it is disabled.
        full_width: every slot may speculate.
    """

    num_drafts: int = 0
    rollback: SsmRollbackMode = SsmRollbackMode.CARRY
    dispatch_cap: int = DISPATCH_CAP
    ladder: Ladder | None = DEFAULT_LADDER
    full_width: bool = False

    def covered(self, max_batch_size: int) -> int:
        """Slots that may speculate, 0 without speculation."""
        if self.num_drafts == 0:
            return 0
        return mtp_state_slots_with(max_batch_size, self.dispatch_cap, self.full_width)

    def ring_slots(self, max_batch_size: int) -> int:
        """Slots of the carry ring with its dummy, 0 in the other modes."""
        if self.num_drafts == 0 or self.rollback is not SsmRollbackMode.CARRY:
            return 0
        return self.covered(max_batch_size) + 1


def ssm_h_stored_bytes(h_bytes: int, h_f16_pool: bool) -> int:
    """Bytes of an h state as the pool stores it: half under `--ssm-h-dtype f16-pool`."""
    return h_bytes // _FLOAT32 * _FLOAT16 if h_f16_pool else h_bytes


def ssm_stored_blob_bytes(blob: SsmBlob, h_f16_pool: bool) -> int:
    """Bytes of one sequence's whole state as the pools store it."""
    return ssm_h_stored_bytes(blob.h_bytes, h_f16_pool) + blob.conv_bytes


def ssm_h_prefill_stage_bytes(blob: SsmBlob, max_batch_size: int, h_f16_pool: bool) -> int:
    """Float32 staging of one layer's h per slot, which a prefill needs over an f16 pool."""
    if not h_f16_pool or blob.layers == 0:
        return 0
    return max_batch_size * (blob.h_bytes // blob.layers)


def ssm_pool_reserve_bytes(
    blob: SsmBlob,
    max_batch_size: int,
    *,
    spec_on: bool,
    num_drafts: int,
    mtp_state_slots: int,
    rollback: SsmRollbackMode,
    dispatch_cap: int = DISPATCH_CAP,
    ladder: Ladder | None = DEFAULT_LADDER,
    uniform_verify: bool = False,
    full_width: bool = False,
    h_f16_pool: bool = False,
) -> int:
    """State pool and verify pools, without dummy slots and without rings.

    Per sequence a blob. With speculation, per slot below `mtp_state_slots`: in snapshot mode its h
    intermediates, num_drafts + 1 conv states and a checkpoint blob; in replay mode the checkpoint.
    """
    h = ssm_h_stored_bytes(blob.h_bytes, h_f16_pool)
    stored = h + blob.conv_bytes
    total = max_batch_size * stored
    if not spec_on or rollback is SsmRollbackMode.CARRY:
        return total
    total += mtp_state_slots * stored
    if rollback is SsmRollbackMode.REPLAY:
        return total
    intermediates = sum(
        verify_slot_h_intermediates(
            slot,
            dispatch_cap,
            num_drafts,
            ladder,
            uniform_verify=uniform_verify,
            full_width=full_width,
        )
        for slot in range(mtp_state_slots)
    )
    return total + intermediates * h + mtp_state_slots * (num_drafts + 1) * blob.conv_bytes


def ssm_replay_row_bytes(qkvz_elems: int, nv: int, act_bytes: int = 2) -> int:
    """One verified row's inputs in one layer: q, k, v, z in the activations' type, two gates."""
    return act_bytes * qkvz_elems + 2 * _FLOAT32 * nv


def ssm_replay_ring_bytes(
    covered: int, k_ceiling: int, layers: int, row: int, *, spec_on: bool, rollback: SsmRollbackMode
) -> int:
    """Rows kept to replay a partial accept: at most K - 1 of K are run again."""
    if not spec_on or rollback is not SsmRollbackMode.REPLAY:
        return 0
    return covered * (k_ceiling - 1) * layers * row


def ssm_carry_row_bytes(conv_dim: int, value_heads: int, act_bytes: int) -> int:
    """One row not yet folded in, in one layer: its inputs to the convolution and two gates."""
    return act_bytes * conv_dim + 2 * _FLOAT32 * value_heads


def ssm_carry_ring_bytes(covered: int, num_drafts: int, layers: int, row: int) -> int:
    """All that carry mode adds to the state pool, without the ring's dummy slot."""
    return covered * num_drafts * layers * row


def prefix_caching_active(flag: bool, kv_only_is_safe: bool) -> bool:
    """Whether a prefix cache will really be installed.

    `kv_only_is_safe` holds for these hybrids, whose snapshots complete the KV; it does not for a
    model whose recurrent state cannot be restored.
    """
    return flag and kv_only_is_safe


def marconi_snapshot_slots_with(
    requested: int, prefix_caching_active: bool, full_reserve: bool
) -> MarconiSlotDecision:
    """Snapshots of the prefix cache to reserve; `full_reserve` is ATLAS_SSM_MARCONI_FULL."""
    if requested == 0 or prefix_caching_active or full_reserve:
        return MarconiSlotDecision(requested)
    return MarconiSlotDecision(0, f"no prefix cache is active to fill {requested} snapshot slots")
