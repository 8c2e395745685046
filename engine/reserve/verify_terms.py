"""Ledger terms of speculation in each rollback mode. Does not know when a step speculates."""

from __future__ import annotations

import math

from engine.config import EngineConfig
from engine.pools.shapes import FLOAT32_BYTES, LOG_ROWS, drafter_log_shape
from engine.reserve.ledger import LedgerTerm, TermKind
from engine.reserve.parameters import element_bytes
from engine.reserve.ssm_reserve import (
    SpeculationPolicy,
    SsmBlob,
    SsmRollbackMode,
    ssm_blob,
    ssm_pool_reserve_bytes,
    ssm_replay_ring_bytes,
    ssm_replay_row_bytes,
    ssm_stored_blob_bytes,
)
from engine.weights.model_config import ModelConfig

VERIFY_POOL = "verify_pool"
VERIFY_DUMMY = "verify_dummy"
REPLAY_RING = "replay_ring"
REPLAY_RING_DUMMY = "replay_ring_dummy"
DRAFTER_LOG = "drafter_log"
SNAPSHOTS = "snapshots"
SNAPSHOT_HIDDEN = "snapshot_hidden"
DECODE_RING = "decode_ring"


def verify_terms(
    model: ModelConfig, config: EngineConfig, policy: SpeculationPolicy
) -> tuple[LedgerTerm, ...]:
    """The drafter's log, and verify pools and replay ring, each with a dummy slot.

    Carry mode has neither: its ring is part of the state pool's shapes and has its terms there.
    """
    if policy.num_drafts == 0:
        return ()
    shape = drafter_log_shape(model, config.max_batch_size)
    log = LedgerTerm(
        DRAFTER_LOG,
        math.prod(shape) * element_bytes(config.dtype),
        TermKind.EXACT,
        f"last {LOG_ROWS} hidden states of {shape[0]} slots",
    )
    if policy.rollback is SsmRollbackMode.CARRY:
        return (log,)
    blob, covered = ssm_blob(model), policy.covered(config.max_batch_size)
    half = config.h_f16_pool
    pool = _verify_pool_bytes(blob, config.max_batch_size, covered, policy, half)
    terms = [
        log,
        LedgerTerm(
            VERIFY_POOL, pool, TermKind.EXACT, f"{policy.rollback.value} of {covered} slots"
        ),
        LedgerTerm(
            VERIFY_DUMMY, _widest_slot(blob, policy, half), TermKind.EXACT, "one slot for padding"
        ),
    ]
    if policy.rollback is SsmRollbackMode.REPLAY:
        # The pool keeps its rings in float32, whatever the activations are.
        rows = ssm_replay_row_bytes(blob.qkvz_elems, blob.value_heads, FLOAT32_BYTES)

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


def snapshot_terms(
    model: ModelConfig, config: EngineConfig, policy: SpeculationPolicy
) -> tuple[LedgerTerm, ...]:
    """Snapshots of the prefix cache, one blob each, and a hidden state of each for the drafter."""
    slots = config.snapshot_slots
    if slots == 0:
        return ()
    blob = ssm_stored_blob_bytes(ssm_blob(model), config.h_f16_pool)
    term = LedgerTerm(
        SNAPSHOTS, slots * blob, TermKind.EXACT, f"{slots} of {blob} bytes (--ssm-cache-slots)"
    )
    if policy.num_drafts == 0:
        return (term,)
    hidden = slots * model.hidden_size * element_bytes(config.dtype)
    why = f"a hidden state of each of {slots} snapshots"
    return (term, LedgerTerm(SNAPSHOT_HIDDEN, hidden, TermKind.EXACT, why))


def decode_ring_slot_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one snapshot of every sequence in the decode-rollback ring."""
    return config.max_batch_size * ssm_stored_blob_bytes(ssm_blob(model), config.h_f16_pool)


def decode_ring_terms(model: ModelConfig, config: EngineConfig) -> tuple[LedgerTerm, ...]:
    """The decode-rollback ring at the depth that `config` names; none where it names none."""
    slots = config.decode_ring_slots
    if not slots or model.gdn_layers == 0:
        return ()
    return (
        LedgerTerm(
            DECODE_RING,
            slots * decode_ring_slot_bytes(model, config),
            TermKind.EXACT,
            f"{slots} snapshots of {config.max_batch_size} sequences (--ssm-decode-ring-slots)",
        ),
    )


def _verify_pool_bytes(
    blob: SsmBlob, max_batch_size: int, covered: int, policy: SpeculationPolicy, h_f16_pool: bool
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
        h_f16_pool=h_f16_pool,
    )
    return whole - max_batch_size * ssm_stored_blob_bytes(blob, h_f16_pool)


def _widest_slot(blob: SsmBlob, policy: SpeculationPolicy, h_f16_pool: bool) -> int:
    """Slot 0, which runs at every width and so has the most drafts."""
    return _verify_pool_bytes(blob, 1, 1, policy, h_f16_pool)
