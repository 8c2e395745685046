"""Shapes of the pools, without torch: the ledger reserves and the pools allocate by these alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import GRID
from engine.weights.model_config import ModelConfig

FLOAT32_BYTES = 4
FLOAT16_BYTES = 2
# Hidden states remembered per slot while a sequence does not speculate; what its drafter sees then.
LOG_ROWS = GRID


@dataclass(frozen=True, slots=True)
class StatePoolShapes:
    """Tensors of the recurrent state; the last slot of each is a dummy for padding.

    All are float32, but for h under f16-pool, which is float16.

    Attributes:
        h: [layers, slots + 1, Hv, Dk, Dv].
        conv: [layers, slots + 1, conv_dim, kernel].
        ring_inputs: [layers, ring slots, drafts, conv_dim] rows not yet folded into h (carry).
        ring_gates: [layers, ring slots, drafts, 2, Hv].
        stage: [slots + 1, Hv, Dk, Dv] one layer's h in float32, only under f16-pool.
        h_f16: whether it is.
    """

    h: tuple[int, ...]
    conv: tuple[int, ...]
    ring_inputs: tuple[int, ...]
    ring_gates: tuple[int, ...]
    stage: tuple[int, ...] = (0,)
    h_f16: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of h and conv."""
        element = FLOAT16_BYTES if self.h_f16 else FLOAT32_BYTES
        return math.prod(self.h) * element + math.prod(self.conv) * FLOAT32_BYTES

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        return (math.prod(self.ring_inputs) + math.prod(self.ring_gates)) * FLOAT32_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of the stage."""
        return math.prod(self.stage) * FLOAT32_BYTES


def state_pool_shapes(
    config: ModelConfig,
    slots: int,
    *,
    ring_slots: int = 0,
    drafts: int = 0,
    ring_width: int | None = None,
    h_f16: bool = False,
) -> StatePoolShapes:
    """For `slots` sequences and a dummy; `ring_slots` counts its own dummy, 0 for no ring.

    `ring_width` is the columns kept of a row: conv_dim in carry mode, q, k, v and z in replay.
    """
    layers, heads = config.gdn_layers, config.linear_num_value_heads
    width = config.conv_dim if ring_width is None else ring_width
    one = (slots + 1, heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return StatePoolShapes(
        h=(layers, *one),
        conv=(layers, slots + 1, config.conv_dim, config.linear_conv_kernel_dim),
        ring_inputs=(layers, ring_slots, drafts, width),
        ring_gates=(layers, ring_slots, drafts, 2, heads),
        stage=one if h_f16 and layers else (0,),
        h_f16=h_f16,
    )


@dataclass(frozen=True, slots=True)
class VerifyPoolShapes:
    """Tensors that snapshot and replay mode need beside the state pool; all empty in carry.

    Those of h have the type that it has in the state pool, the others are float32.

    Attributes:
        checkpoint_h, checkpoint_conv: the state before a verify, by covered slot and dummy.
        snapshot_h: [layers, places, Hv, Dk, Dv].
        snapshot_conv: [layers, slots, K, conv_dim, kernel].
        first_place: the first place in snapshot_h of each slot, dummy last.
    """

    checkpoint_h: tuple[int, ...]
    checkpoint_conv: tuple[int, ...]
    snapshot_h: tuple[int, ...]
    snapshot_conv: tuple[int, ...]
    first_place: tuple[int, ...]


def verify_pool_shapes(
    config: ModelConfig, slots: int, *, intermediates: tuple[int, ...] = (), drafts: int = 0
) -> VerifyPoolShapes:
    """Checkpoints of `slots` slots, dummy included, and snapshots where there are intermediates.

    Args:
        slots: covered slots and their dummy, 0 in carry mode.
        intermediates: h states kept per slot, one entry a slot; empty in replay mode.
        drafts: conv states kept per slot are one more.
    """
    layers, heads = config.gdn_layers, config.linear_num_value_heads
    h = (heads, config.linear_key_head_dim, config.linear_value_head_dim)
    conv = (config.conv_dim, config.linear_conv_kernel_dim)
    first = tuple(sum(intermediates[:slot]) for slot in range(len(intermediates)))
    return VerifyPoolShapes(
        checkpoint_h=(layers, slots, *h),
        checkpoint_conv=(layers, slots, *conv),
        snapshot_h=(layers, sum(intermediates), *h),
        snapshot_conv=(layers, len(intermediates), drafts + 1, *conv),
        first_place=first,
    )


@dataclass(frozen=True, slots=True)
class KvPoolShapes:
    """Pages of GRID tokens; the last block is a dummy for padding.

    Attributes:
        k: [layers, blocks + 1, nKV, hd, GRID], v: [layers, blocks + 1, nKV, GRID, hd].
    """

    k: tuple[int, ...]
    v: tuple[int, ...]

    def nbytes(self, element: int) -> int:
        """Bytes of both at `element` bytes a number."""
        return (math.prod(self.k) + math.prod(self.v)) * element


def kv_pool_shapes(config: ModelConfig, blocks: int, *, with_mtp: bool) -> KvPoolShapes:
    """For `blocks` blocks and a dummy; the drafter adds one layer, the last."""
    layers = config.attention_layers + (1 if with_mtp else 0)
    heads, dim = config.num_key_value_heads, config.head_dim
    return KvPoolShapes(
        k=(layers, blocks + 1, heads, dim, GRID), v=(layers, blocks + 1, heads, GRID, dim)
    )


def drafter_log_shape(config: ModelConfig, slots: int) -> tuple[int, int, int]:
    """[slots + 1, LOG_ROWS, H] of the drafter's remembered hidden states, in the KV's dtype."""
    return (slots + 1, LOG_ROWS, config.hidden_size)
