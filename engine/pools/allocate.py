"""Makes the pools of a configuration, and accounts for what they hold by ledger term."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.pools.buffers import StepBuffers
from engine.pools.kv import KvPool
from engine.pools.shapes import (
    StatePoolShapes,
    VerifyPoolShapes,
    drafter_log_shape,
    kv_pool_shapes,
    state_pool_shapes,
    verify_pool_shapes,
)
from engine.pools.snapshots import StateSnapshots
from engine.pools.state import SsmStatePool
from engine.reserve.graphs import GRAPH_STATIC, uses_graphs
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode, mtp_slot_draft_capacity
from engine.reserve.terms import Speculation, allocated_terms, decode_rows
from engine.reserve.verify_terms import (
    DECODE_RING,
    DRAFTER_LOG,
    REPLAY_RING,
    REPLAY_RING_DUMMY,
    SNAPSHOT_HIDDEN,
    SNAPSHOTS,
    VERIFY_DUMMY,
    VERIFY_POOL,
)
from engine.weights.model_config import ModelConfig
from kernels.gdn.types import GdnState
from kernels.moves.naive import MoveRows
from kernels.moves.naive import move_rows as naive_move_rows


@dataclass(frozen=True, slots=True)
class Pools:
    """The tensors that sequences live in, and what the prefix cache keeps of them.

    Attributes:
        drafter_log: see drafter_log_shape, 0 slots without a drafter.
        snapshot_hidden: [places, H] hidden state of the last token before each snapshot, for the
            drafter; 0 places without one.
        decode_ring: snapshots to roll back to, equally many of each of max_batch_size sequences.
        buffers: what captured steps read and write, where steps are captured.
    """

    states: SsmStatePool
    kv: KvPool
    drafter_log: Tensor
    snapshots: StateSnapshots
    snapshot_hidden: Tensor
    decode_ring: StateSnapshots
    buffers: StepBuffers | None = None

    def gdn_layer(self, index: int) -> GdnState:
        """Views of GDN layer number `index`, counted among GDN layers only."""
        h, conv = self.snapshots.h[index], self.snapshots.conv[index]
        return replace(self.states.layer(index), saved_h=h, saved_conv=conv)


def allocate_pools(
    model: ModelConfig,
    config: EngineConfig,
    policy: SpeculationPolicy,
    kv_blocks: int,
    dtype: torch.dtype,
    move_rows: MoveRows = naive_move_rows,
    *,
    ring_slots: int = 0,
) -> Pools:
    """State, verify storage and KV pages for `config`; KV of the drafter when it speculates.

    `ring_slots` is the depth of the decode-rollback ring, whatever `config` asks for.
    """
    device = torch.device(config.device)
    slots, verify = pool_shapes(model, config.max_batch_size, policy, h_f16=config.h_f16_pool)
    speculates = policy.num_drafts > 0
    pages = kv_pool_shapes(model, kv_blocks, with_mtp=speculates)
    log = drafter_log_shape(model, config.max_batch_size) if speculates else (0, 0, 0)
    states = SsmStatePool(slots, verify, device, move_rows)
    hidden = (config.snapshot_slots if speculates else 0, model.hidden_size)
    buffers: StepBuffers | None = None
    if uses_graphs(config):
        rows = decode_rows(config, Speculation(drafts=policy.num_drafts))
        buffers = StepBuffers(model, config, rows, dtype, device)
    return Pools(
        states,
        KvPool(pages, dtype, device),
        torch.zeros(log, dtype=dtype, device=device),
        StateSnapshots(states, config.snapshot_slots),
        torch.zeros(hidden, dtype=dtype, device=device),
        StateSnapshots(states, config.max_batch_size * ring_slots),
        buffers,
    )


def pool_shapes(
    model: ModelConfig, max_batch_size: int, policy: SpeculationPolicy, *, h_f16: bool = False
) -> tuple[StatePoolShapes, VerifyPoolShapes]:
    """Shapes of the recurrent state and of what the rollback mode needs beside it.

    The dummy of every verify pool is as deep as slot 0, the deepest.
    """
    drafts = policy.num_drafts
    slots = policy.covered(max_batch_size) + 1 if drafts else 0
    match policy.rollback:
        case SsmRollbackMode.CARRY:
            return (
                state_pool_shapes(
                    model, max_batch_size, ring_slots=slots, drafts=drafts, h_f16=h_f16
                ),
                verify_pool_shapes(model, 0),
            )
        case SsmRollbackMode.REPLAY:
            width = model.conv_dim + model.value_dim
            return (
                state_pool_shapes(
                    model,
                    max_batch_size,
                    ring_slots=slots,
                    drafts=drafts,
                    ring_width=width,
                    h_f16=h_f16,
                ),
                verify_pool_shapes(model, slots),
            )
        case SsmRollbackMode.SNAPSHOT:
            depths = [
                mtp_slot_draft_capacity(
                    slot,
                    policy.dispatch_cap,
                    drafts,
                    policy.rollback,
                    policy.ladder,
                    full_width=policy.full_width,
                )
                for slot in (*range(slots - 1), 0)
            ]
            intermediates = tuple(depths) if slots else ()
            return (
                state_pool_shapes(model, max_batch_size, h_f16=h_f16),
                verify_pool_shapes(model, slots, intermediates=intermediates, drafts=drafts),
            )


def pool_terms(
    config: EngineConfig, policy: SpeculationPolicy, pools: Pools, rotary_bytes: int
) -> dict[str, int]:
    """Bytes that the pools hold, by exact ledger term; `rotary_bytes` of the rotary tables."""
    states, kv = pools.states, pools.kv
    carry = policy.rollback is SsmRollbackMode.CARRY
    terms = allocated_terms(
        config,
        state_bytes=states.nbytes,
        stage_bytes=0 if states.stage is None else states.stage.nbytes,
        ring_bytes=states.ring_bytes if carry else 0,
        ring_slots=states.ring_slots if carry else 0,
        kv_bytes=kv.nbytes,
        kv_blocks=kv.blocks,
        rotary_bytes=rotary_bytes,
    )
    if pools.buffers is not None:
        terms[GRAPH_STATIC] = pools.buffers.nbytes
    if config.snapshot_slots:
        terms[SNAPSHOTS] = pools.snapshots.nbytes
    if pools.decode_ring.places:
        terms[DECODE_RING] = pools.decode_ring.nbytes
    if policy.num_drafts == 0:
        return terms
    terms[DRAFTER_LOG] = pools.drafter_log.nbytes
    if config.snapshot_slots:
        terms[SNAPSHOT_HIDDEN] = pools.snapshot_hidden.nbytes
    if carry:
        return terms
    dummy = states.blob_bytes
    if policy.rollback is SsmRollbackMode.SNAPSHOT:
        places = int(states.snapshot_h.shape[1]) - states.first_place[-1]
        dummy += places * states.h_bytes + (policy.num_drafts + 1) * states.conv_bytes
    terms |= {VERIFY_POOL: states.verify_bytes - dummy, VERIFY_DUMMY: dummy}
    if policy.rollback is SsmRollbackMode.REPLAY:
        one = states.ring_bytes // states.ring_slots
        terms |= {REPLAY_RING: states.ring_bytes - one, REPLAY_RING_DUMMY: one}
    return terms
