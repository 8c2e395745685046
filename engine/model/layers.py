"""Packed layers, built from checkpoint weights. Each is a callable over [R, H] rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.layout import (
    AttentionWeights,
    DenseMlpWeights,
    GdnWeights,
    LayerWeights,
    MoeWeights,
)
from engine.weights.model_config import ModelConfig
from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.gdn.types import GdnParams, GdnState
from kernels.moe.naive import Expert, MoeParams
from kernels.ops import Linear, Ops


@dataclass(frozen=True, slots=True)
class GdnMixer:
    """Linear attention with its slot state: [R, H] -> [R, H]."""

    in_proj: Linear
    params: GdnParams
    out_proj: Linear
    state: GdnState
    ops: Ops

    def __call__(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        """Mix rows x [R, H]; updates the state of the batch's slots."""
        mixed = self.ops.gdn_mixer(self.in_proj(x), self.params, self.state, batch)
        return self.out_proj(mixed)

    def fold(self, batch: RaggedBatch) -> None:
        """Fold the pending rows of a batch without own rows into the state."""
        p = self.params
        columns = p.conv_dim + p.value_dim + 2 * p.value_heads
        nothing = torch.empty(0, columns, device=self.state.h.device)
        self.ops.gdn_mixer(nothing, p, self.state, batch)


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Gated full attention over its KV pages: [R, H] -> [R, H]."""

    qkv_proj: Linear
    params: AttentionParams
    o_proj: Linear
    pages: KvPages
    ops: Ops

    def __call__(self, x: Tensor, batch: RaggedBatch, wanted: Tensor | None = None) -> Tensor:
        """Mix rows x [R, H]; writes their keys and values. With `wanted`, these rows only."""
        qkv = self.qkv_proj(x)
        return self.o_proj(self.ops.attention_mixer(qkv, self.params, self.pages, batch, wanted))

    def write(self, x: Tensor, batch: RaggedBatch) -> None:
        """Write keys and values of rows x [R, H], and nothing else."""
        nothing = torch.empty(0, dtype=torch.int64, device=x.device)
        qkv = self.qkv_proj(x)
        self.ops.attention_mixer(qkv, self.params, self.pages, batch, nothing)


Mixer = GdnMixer | AttentionMixer


@dataclass(frozen=True, slots=True)
class Layer:
    """One pre-norm decoder layer; `eps` is that of both norms."""

    input_norm: Tensor
    mixer: Mixer
    post_norm: Tensor
    mlp: Callable[[Tensor], Tensor]
    eps: float
    ops: Ops

    def __call__(self, residual: Tensor, delta: Tensor | None, batch: RaggedBatch) -> Tensor:
        """Add `delta` and this mixer's output to residual [R, H] in place; returns the MLP's."""
        x = self.ops.add_rms_norm(residual, delta, self.input_norm, self.eps)
        mixed = self.mixer(x, batch)
        x = self.ops.add_rms_norm(residual, mixed, self.post_norm, self.eps)
        return self.mlp(x)


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """cos, sin [length, rotary_dim / 2] float32: angle = position * theta^(-2 i / rotary_dim).

    Computed in float32 as transformers does, so that long positions round the same way.
    """
    half = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float()
    inverse = 1.0 / (config.rope_theta ** (half / config.rotary_dim))
    angle = torch.arange(length).float()[:, None] * inverse
    return angle.cos(), angle.sin()


def rotary_bytes(config: ModelConfig, length: int) -> int:
    """Bytes of both tables of rotary_tables."""
    return 2 * length * (config.rotary_dim // 2) * 4


def gdn_mixer(weights: GdnWeights, config: ModelConfig, state: GdnState, ops: Ops) -> GdnMixer:
    """Pack one GDN layer."""
    params = GdnParams(
        conv=weights.conv.float().T.contiguous(),
        decay=-weights.a_log.float().exp(),
        dt_bias=weights.dt_bias.float(),
        norm=weights.norm.float(),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_width=config.linear_key_head_dim,
        value_width=config.linear_value_head_dim,
        eps=config.rms_norm_eps,
    )
    return GdnMixer(
        ops.pack_linear(weights.in_proj), params, ops.pack_linear(weights.out_proj), state, ops
    )


def attention_mixer(
    weights: AttentionWeights,
    config: ModelConfig,
    rotary: tuple[Tensor, Tensor],
    pages: KvPages,
    ops: Ops,
) -> AttentionMixer:
    """Pack one full-attention layer; `rotary` is the model's (cos, sin)."""
    params = AttentionParams(
        q_norm=weights.q_norm.float(),
        k_norm=weights.k_norm.float(),
        cos=rotary[0],
        sin=rotary[1],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
    )
    return AttentionMixer(
        ops.pack_linear(weights.qkv_proj), params, ops.pack_linear(weights.o_proj), pages, ops
    )


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """silu(gate x) * (up x), then down."""

    expert: Expert
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        return self.expert.down(self.ops.silu_mul(self.expert.gate_up(x)))


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """Mixture of experts with a shared one."""

    params: MoeParams
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        return self.ops.moe_mlp(x, self.params, self.ops.silu_mul)


def mlp(weights: DenseMlpWeights | MoeWeights, config: ModelConfig, ops: Ops) -> DenseMlp | MoeMlp:
    """Pack an MLP of either kind."""
    if isinstance(weights, DenseMlpWeights):
        return DenseMlp(
            Expert(ops.pack_linear(weights.gate_up), ops.pack_linear(weights.down)), ops
        )
    shared = Expert(ops.pack_linear(weights.shared_gate_up), ops.pack_linear(weights.shared_down))
    params = MoeParams(
        router=ops.pack_linear(weights.router),
        experts=ops.pack_experts(weights.gate_up, weights.down),
        shared=shared,
        shared_gate=ops.pack_linear(weights.shared_expert_gate),
        top_k=config.num_experts_per_tok,
        renormalise=config.norm_topk_prob,
    )
    return MoeMlp(params, ops)


def layer(weights: LayerWeights, mixer: Mixer, config: ModelConfig, ops: Ops) -> Layer:
    """Pack one decoder layer around its mixer."""
    return Layer(
        input_norm=weights.input_norm.float(),
        mixer=mixer,
        post_norm=weights.post_norm.float(),
        mlp=mlp(weights.mlp, config, ops),
        eps=config.rms_norm_eps,
        ops=ops,
    )
