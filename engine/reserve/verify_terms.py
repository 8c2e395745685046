"""Ledger terms of speculation in each rollback mode. Does not know when a step speculates."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.reserve.ladder import DEFAULT_LADDER, Ladder
from engine.reserve.ledger import LedgerTerm, TermKind
from engine.reserve.parameters import element_bytes
from engine.reserve.ssm_reserve import (
    DISPATCH_CAP,
    SsmBlob,
    SsmRollbackMode,
    mtp_state_slots_with,
    ssm_blob,
    ssm_pool_reserve_bytes,
    ssm_replay_ring_bytes,
    ssm_replay_row_bytes,
)
from engine.weights.model_config import ModelConfig

VERIFY_POOL = "verify_pool"
VERIFY_DUMMY = "verify_dummy"
REPLAY_RING = "replay_ring"
REPLAY_RING_DUMMY = "replay_ring_dummy"
SNAPSHOTS = "snapshots"


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


def verify_terms(
    model: ModelConfig, config: EngineConfig, policy: SpeculationPolicy
) -> tuple[LedgerTerm, ...]:
    """Verify pools and replay ring, each with a dummy slot; nothing in carry mode.

    The carry ring is part of the state pool's shapes and has its terms there.
    """
    if policy.num_drafts == 0 or policy.rollback is SsmRollbackMode.CARRY:
        return ()
    blob, covered = ssm_blob(model), policy.covered(config.max_batch_size)
    pool = _verify_pool_bytes(blob, config.max_batch_size, covered, policy)
    terms = [
        LedgerTerm(
            VERIFY_POOL, pool, TermKind.EXACT, f"{policy.rollback.value} of {covered} slots"
        ),
        LedgerTerm(
            VERIFY_DUMMY, _widest_slot(blob, policy), TermKind.EXACT, "one slot for padding"
        ),
    ]
    if policy.rollback is SsmRollbackMode.REPLAY:
        rows = ssm_replay_row_bytes(blob.qkvz_elems, blob.value_heads, element_bytes(config.dtype))

        def ring(slots: int) -> int:
            return ssm_replay_ring_bytes(
                slots,
                policy.num_drafts + 1,
                blob.layers,
                rows,
                spec_on=True,
                rollback=policy.rollback,
            )

        why = f"{policy.num_drafts} rows of {covered} slots"
        terms += [
            LedgerTerm(REPLAY_RING, ring(covered), TermKind.EXACT, why),
            LedgerTerm(REPLAY_RING_DUMMY, ring(1), TermKind.EXACT, "one slot for padding"),
        ]
    return tuple(terms)


def snapshot_term(model: ModelConfig, slots: int) -> LedgerTerm:
    """Snapshots of the prefix cache, one blob each."""
    blob = ssm_blob(model).nbytes
    return LedgerTerm(SNAPSHOTS, slots * blob, TermKind.EXACT, f"{slots} of {blob} bytes")


def _verify_pool_bytes(
    blob: SsmBlob, max_batch_size: int, covered: int, policy: SpeculationPolicy
) -> int:
    whole = ssm_pool_reserve_bytes(
        blob,
        max_batch_size,
        spec_on=True,
        num_drafts=policy.num_drafts,
        mtp_state_slots=covered,
        rollback=policy.rollback,
        dispatch_cap=policy.dispatch_cap,
        ladder=policy.ladder,
        full_width=policy.full_width,
    )
    return whole - max_batch_size * blob.nbytes


def _widest_slot(blob: SsmBlob, policy: SpeculationPolicy) -> int:
    """Slot 0, which runs at every width and so has the most drafts."""
    return _verify_pool_bytes(blob, 1, 1, policy)
