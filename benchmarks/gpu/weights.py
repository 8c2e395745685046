"""Random weights of a model's exact shapes, made on the device. Reads no file, copies from no host.

Answers mean nothing; sizes, types and the path through the network are those of a checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.layout import (
    AttentionWeights,
    DenseMlpWeights,
    GdnWeights,
    LayerWeights,
    MoeWeights,
    MtpWeights,
)
from engine.weights.model_config import LayerKind, ModelConfig


class RandomWeights:
    """An `engine.weights.layout.WeightSource` of normal numbers.

    Every matrix [N, K] has deviation K^-1/2, so that activations keep their size through the
    layers; gates and norms vary around their usual values.

    Args:
        config: of the model to stand in for.
        device: where the tensors are made.
        dtype: of the matrices.
        seed: of all numbers.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def embed(self) -> Tensor:
        """[V, H] token embeddings of deviation 1."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._normal(shape, 1.0, self._dtype)

    def norm(self) -> Tensor:
        """[H] float32 scale of the final norm."""
        return self._scale(self._config.hidden_size)

    def lm_head(self) -> Tensor | None:
        """[V, H], or None when it is tied to the embeddings."""
        if self._config.tie_word_embeddings:
            return None
        return self._matrix(self._config.vocab_size, self._config.hidden_size)

    def layer(self, index: int) -> LayerWeights:
        """Decoder layer number `index` of the trunk."""
        return self._layer(self._config.layer_kinds[index])

    def mtp(self) -> MtpWeights | None:
        """The drafter, or None when the config has none."""
        if self._config.mtp_layers == 0:
            return None
        width = self._config.hidden_size
        return MtpWeights(
            fc=self._matrix(width, 2 * width),
            norm_embedding=self._scale(width),
            norm_hidden=self._scale(width),
            layer=self._layer(LayerKind.FULL),
            norm=self._scale(width),
        )

    def _layer(self, kind: LayerKind) -> LayerWeights:
        width = self._config.hidden_size
        return LayerWeights(
            kind=kind,
            input_norm=self._scale(width),
            mixer=self._gdn() if kind is LayerKind.LINEAR else self._attention(),
            post_norm=self._scale(width),
            mlp=self._moe() if self._config.num_experts else self._dense(),
        )

    def _gdn(self) -> GdnWeights:
        c = self._config
        heads = c.linear_num_value_heads
        # exp(a_log) within 0.01 .. 4, as trained models have it.
        rate = torch.empty(heads, device=self._device).uniform_(
            0.01, 4.0, generator=self._generator
        )
        return GdnWeights(
            in_proj=self._matrix(c.conv_dim + c.value_dim + 2 * heads, c.hidden_size),
            conv=self._normal((c.conv_dim, c.linear_conv_kernel_dim), 0.5, self._dtype),
            a_log=rate.log(),
            dt_bias=self._normal((heads,), 0.5, torch.float32),
            norm=self._scale(c.linear_value_head_dim),
            out_proj=self._matrix(c.hidden_size, c.value_dim),
        )

    def _attention(self) -> AttentionWeights:
        c = self._config
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return AttentionWeights(
            qkv_proj=self._matrix(2 * queries + 2 * keys, c.hidden_size),
            o_proj=self._matrix(c.hidden_size, queries),
            q_norm=self._scale(c.head_dim),
            k_norm=self._scale(c.head_dim),
        )

    def _dense(self) -> DenseMlpWeights:
        inner, width = self._config.intermediate_size, self._config.hidden_size
        return DenseMlpWeights(self._matrix(2 * inner, width), self._matrix(width, inner))

    def _moe(self) -> MoeWeights:
        c = self._config
        experts, inner, width = c.num_experts, c.moe_intermediate_size, c.hidden_size
        shared = c.shared_expert_intermediate_size
        return MoeWeights(
            router=self._matrix(experts, width),
            gate_up=self._normal((experts, 2 * inner, width), width**-0.5, self._dtype),
            down=self._normal((experts, width, inner), inner**-0.5, self._dtype),
            shared_gate_up=self._matrix(2 * shared, width),
            shared_down=self._matrix(width, shared),
            shared_expert_gate=self._matrix(1, width),
        )

    def _matrix(self, rows: int, columns: int) -> Tensor:
        return self._normal((rows, columns), columns**-0.5, self._dtype)

    def _scale(self, width: int) -> Tensor:
        return 1.0 + self._normal((width,), 0.1, torch.float32)

    def _normal(self, shape: tuple[int, ...], deviation: float, dtype: torch.dtype) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device=self._device)
        return empty.normal_(0.0, deviation, generator=self._generator)
