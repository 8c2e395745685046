"""What every form of the GDN mixer takes: one layer's parameters and one layer's state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GdnParams:
    """Small parameters of one layer, float32.

    Attributes:
        conv: [kernel, conv_dim] depthwise weights, newest tap last.
        decay: [Hv] = -exp(A_log).
        dt_bias: [Hv].
        norm: [Dv] plain scale of the gated norm.
        key_heads, value_heads, key_width, value_width: Hk, Hv, Dk, Dv.
        eps: of the gated norm.
    """

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    eps: float

    @property
    def conv_dim(self) -> int:
        """Channels that pass through the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def value_dim(self) -> int:
        """Channels of v, of z and of the mixer's output."""
        return self.value_heads * self.value_width


@dataclass(frozen=True, slots=True)
class GdnState:
    """One layer's state of every slot, float32 but for h and its snapshots, which may be float16.

    In float16 the state is rounded after every row, of a prompt (`RaggedBatch.chunked`) only where
    a row ends a block of 64 tokens or the segment; then its bits depend neither on how a prompt was
    split nor on how rows were verified. Numbers beyond float16's largest become that.

    Attributes:
        h: [slots + 1, Hv, Dk, Dv].
        conv: [slots + 1, conv_dim, kernel] raw inputs, newest last (the oldest is never read).
        ring_inputs: [ring slots, drafts, C >= conv_dim] leading columns of the rows' projections.
        ring_gates: [ring slots, drafts, 2, Hv] their g and beta.
        snapshot_h: [snapshots, Hv, Dk, Dv] states after verified rows.
        snapshot_conv: [snapshot slots, drafts + 1, conv_dim, kernel].
        stage: as h in float32, to run rows in; only with float16.
        saved_h: [places, Hv, Dk, Dv] states that `RaggedBatch.saves` sets aside, in h's type.
        saved_conv: [places, conv_dim, kernel] theirs.
    """

    h: Tensor
    conv: Tensor
    ring_inputs: Tensor
    ring_gates: Tensor
    snapshot_h: Tensor
    snapshot_conv: Tensor
    stage: Tensor | None = None
    saved_h: Tensor | None = None
    saved_conv: Tensor | None = None
