"""Shapes of the pools, without torch: the ledger reserves and the pools allocate by these alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import GRID
from engine.weights.model_config import ModelConfig

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StatePoolShapes:
    """Float32 tensors of the recurrent state; the last slot of each is a dummy for padding.

    Attributes:
        h: [layers, slots + 1, Hv, Dk, Dv].
        conv: [layers, slots + 1, conv_dim, kernel].
        ring_inputs: [layers, ring slots, drafts, conv_dim] rows not yet folded into h (carry).
        ring_gates: [layers, ring slots, drafts, 2, Hv].
    """

    h: tuple[int, ...]
    conv: tuple[int, ...]
    ring_inputs: tuple[int, ...]
    ring_gates: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all four."""
        shapes = (self.h, self.conv, self.ring_inputs, self.ring_gates)
        return sum(math.prod(shape) for shape in shapes) * FLOAT32_BYTES


def state_pool_shapes(
    config: ModelConfig, slots: int, *, ring_slots: int = 0, drafts: int = 0
) -> StatePoolShapes:
    """For `slots` sequences and a dummy; `ring_slots` counts its own dummy, 0 for no ring."""
    layers, heads = config.gdn_layers, config.linear_num_value_heads
    return StatePoolShapes(
        h=(layers, slots + 1, heads, config.linear_key_head_dim, config.linear_value_head_dim),
        conv=(layers, slots + 1, config.conv_dim, config.linear_conv_kernel_dim),
        ring_inputs=(layers, ring_slots, drafts, config.conv_dim),
        ring_gates=(layers, ring_slots, drafts, 2, heads),
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
