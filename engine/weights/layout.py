"""Checkpoint weights in one canonical layout for all three families, as typed frozen values.

Matrices keep the checkpoint's dtype; norm scales are float32 with the 1 of (1 + w) folded in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.weights.model_config import LayerKind


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """One Gated DeltaNet mixer.

    Attributes:
        in_proj: [conv_dim + value_dim + 2 Hv, H], rows [q | k | v | z | b | a].
        conv: [conv_dim, kernel], newest tap last.
        a_log, dt_bias: [Hv] float32.
        norm: [Dv] float32, plain scale.
        out_proj: [H, value_dim].
    """

    in_proj: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One gated attention mixer.

    Attributes:
        qkv_proj: [2 nH hd + 2 nKV hd, H], rows [q of all heads | gate of all heads | k | v].
        o_proj: [H, nH hd].
        q_norm, k_norm: [hd] float32, 1 + w.
    """

    qkv_proj: Tensor
    o_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class DenseMlpWeights:
    """gate_up [2 I, H], gate rows first; down [H, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router [E, H]; gate_up [E, 2 I, H], down [E, H, I]; the shared expert, its gate [1, H]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor
    shared_expert_gate: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; input_norm and post_norm [H] float32, 1 + w."""

    kind: LayerKind
    input_norm: Tensor
    mixer: GdnWeights | AttentionWeights
    post_norm: Tensor
    mlp: DenseMlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The drafter: fc [H, 2 H] over (embedding, hidden), norms [H] float32 as 1 + w, one layer."""

    fc: Tensor
    norm_embedding: Tensor
    norm_hidden: Tensor
    layer: LayerWeights
    norm: Tensor


class WeightSource(Protocol):
    """Where a network's weights come from: a checkpoint, or numbers made on the spot."""

    def embed(self) -> Tensor:
        """[V, H] token embeddings."""
        ...

    def norm(self) -> Tensor:
        """[H] float32 scale of the final norm."""
        ...

    def lm_head(self) -> Tensor | None:
        """[V, H], or None when it is tied to the embeddings."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """Decoder layer number `index` of the trunk."""
        ...

    def mtp(self) -> MtpWeights | None:
        """The drafter, or None when there is none."""
        ...
