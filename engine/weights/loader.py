"""Strict reading of a checkpoint, layer by layer, into the canonical layout.

Every tensor must be consumed exactly once: an unknown, missing or misshapen one is an error that
names it. Knows no device and no packed form.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelFormatError
from engine.weights.headers import TensorHeader, tensor_headers
from engine.weights.layout import (
    AttentionWeights,
    DenseMlpWeights,
    GdnWeights,
    LayerWeights,
    MoeWeights,
    MtpWeights,
)
from engine.weights.model_config import Family, LayerKind, ModelConfig

# bytes read so far, bytes of the whole checkpoint (ignored tensors excluded)
Progress = Callable[[int, int], None]

_FLOATS = {"F64", "F32", "F16", "BF16"}
# A text server has no use for the vision tower.
_IGNORED = ("model.visual.", "visual.")


class Checkpoint:
    """An open checkpoint; use as a context manager, call `finish` after the last tensor.

    Args:
        folder: holds the safetensors files, one or sharded with an index.
        config: of the same folder; all shapes follow from it.
        progress: called after every tensor.

    Raises:
        ModelFormatError: nothing to read, or a header is corrupt.
    """

    def __init__(self, folder: Path, config: ModelConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._headers = {
            name: header
            for name, header in tensor_headers(folder).items()
            if not name.startswith(_IGNORED)
        }
        if not self._headers:
            raise ModelFormatError(f"{folder} holds no safetensors file with weights")
        self._left = dict(self._headers)
        self._files: dict[Path, Any] = {}
        self._progress = progress
        self._done = 0
        self._total = sum(header.nbytes for header in self._headers.values())
        nested = any(name.startswith("model.language_model.") for name in self._headers)
        self._prefix = "model.language_model." if nested else "model."

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    def embed(self) -> Tensor:
        """[V, H] token embeddings."""
        return self._take(f"{self._prefix}embed_tokens.weight", self._vocab_shape)

    def norm(self) -> Tensor:
        """[H] float32 scale of the final norm."""
        return self._scale(f"{self._prefix}norm.weight", self._config.hidden_size)

    def lm_head(self) -> Tensor | None:
        """[V, H], or None when it is tied to the embeddings."""
        if self._config.tie_word_embeddings:
            # Some savers write the tied copy all the same.
            if "lm_head.weight" in self._left:
                self._take("lm_head.weight", self._vocab_shape)
            return None
        return self._take("lm_head.weight", self._vocab_shape)

    def layer(self, index: int) -> LayerWeights:
        """Decoder layer number `index` of the trunk."""
        return self._layer(f"{self._prefix}layers.{index}.", self._config.layer_kinds[index])

    def mtp(self) -> MtpWeights | None:
        """The drafter, or None when the config has none."""
        if self._config.mtp_layers == 0:
            return None
        width = self._config.hidden_size
        return MtpWeights(
            fc=self._take("mtp.fc.weight", (width, 2 * width)),
            norm_embedding=self._scale("mtp.pre_fc_norm_embedding.weight", width),
            norm_hidden=self._scale("mtp.pre_fc_norm_hidden.weight", width),
            layer=self._layer("mtp.layers.0.", LayerKind.FULL),
            norm=self._scale("mtp.norm.weight", width),
        )

    def finish(self) -> None:
        """Check that nothing is left over.

        Raises:
            ModelFormatError: names the first tensors that nobody asked for, and how many there are.
        """
        if self._left:
            names = sorted(self._left)
            shown = ", ".join(names[:3])
            raise ModelFormatError(
                f"the checkpoint has {len(names)} tensors that this model does not know: {shown}"
            )

    @property
    def _vocab_shape(self) -> tuple[int, int]:
        return (self._config.vocab_size, self._config.hidden_size)

    def _layer(self, base: str, kind: LayerKind) -> LayerWeights:
        width = self._config.hidden_size
        linear = kind is LayerKind.LINEAR
        read_mlp = self._moe if self._config.num_experts else self._dense
        return LayerWeights(
            kind=kind,
            input_norm=self._scale(base + "input_layernorm.weight", width),
            mixer=self._gdn(base + "linear_attn.") if linear else self._attention(base),
            post_norm=self._scale(base + "post_attention_layernorm.weight", width),
            mlp=read_mlp(base + "mlp."),
        )

    def _gdn(self, base: str) -> GdnWeights:
        c = self._config
        heads, width = c.linear_num_value_heads, c.hidden_size
        in_proj = self._fused_gdn(base) if self._interleaved(base) else self._split_gdn(base)
        conv = self._take(base + "conv1d.weight", (c.conv_dim, 1, c.linear_conv_kernel_dim))
        return GdnWeights(
            in_proj=in_proj,
            conv=conv[:, 0],
            a_log=self._take(base + "A_log", (heads,)).float(),
            dt_bias=self._take(base + "dt_bias", (heads,)).float(),
            norm=self._take(base + "norm.weight", (c.linear_value_head_dim,)).float(),
            out_proj=self._take(base + "out_proj.weight", (width, c.value_dim)),
        )

    def _interleaved(self, base: str) -> bool:
        return (
            self._config.family is Family.QWEN3_NEXT and base + "in_proj_qkvz.weight" in self._left
        )

    def _split_gdn(self, base: str) -> Tensor:
        c = self._config
        heads, width = c.linear_num_value_heads, c.hidden_size
        parts = (("qkv", c.conv_dim), ("z", c.value_dim), ("b", heads), ("a", heads))
        return torch.cat(
            [self._take(f"{base}in_proj_{name}.weight", (rows, width)) for name, rows in parts]
        )

    def _fused_gdn(self, base: str) -> Tensor:
        """Qwen3-Next: per key head [q | k | v | z] and [b | a], sorted into flat rows."""
        c = self._config
        heads, width = c.linear_num_key_heads, c.hidden_size
        ratio = c.linear_num_value_heads // heads
        dk, dv = c.linear_key_head_dim, ratio * c.linear_value_head_dim
        rows = 2 * (c.key_dim + c.value_dim)
        qkvz = self._take(base + "in_proj_qkvz.weight", (rows, width))
        ba = self._take(base + "in_proj_ba.weight", (2 * c.linear_num_value_heads, width))
        per_head = qkvz.view(heads, -1, width).split((dk, dk, dv, dv), dim=1)
        gates = ba.view(heads, 2 * ratio, width).split((ratio, ratio), dim=1)
        return torch.cat([part.reshape(-1, width) for part in (*per_head, *gates)])

    def _attention(self, layer: str) -> AttentionWeights:
        c = self._config
        base = layer + "self_attn."
        heads, kv, dim, width = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.hidden_size,
        )
        # Per head [q | gate].
        q_gate = self._take(base + "q_proj.weight", (2 * heads * dim, width)).view(
            heads, 2, dim, width
        )
        return AttentionWeights(
            qkv_proj=torch.cat(
                (
                    q_gate[:, 0].reshape(-1, width),
                    q_gate[:, 1].reshape(-1, width),
                    self._take(base + "k_proj.weight", (kv * dim, width)),
                    self._take(base + "v_proj.weight", (kv * dim, width)),
                )
            ),
            o_proj=self._take(base + "o_proj.weight", (width, heads * dim)),
            q_norm=self._scale(base + "q_norm.weight", dim),
            k_norm=self._scale(base + "k_norm.weight", dim),
        )

    def _dense(self, base: str) -> DenseMlpWeights:
        return DenseMlpWeights(*self._gated_mlp(base, self._config.intermediate_size))

    def _gated_mlp(self, base: str, inner: int) -> tuple[Tensor, Tensor]:
        """(gate_up [2 inner, H], down [H, inner])."""
        width = self._config.hidden_size
        gate = self._take(base + "gate_proj.weight", (inner, width))
        up = self._take(base + "up_proj.weight", (inner, width))
        return torch.cat((gate, up)), self._take(base + "down_proj.weight", (width, inner))

    def _moe(self, base: str) -> MoeWeights:
        c = self._config
        experts, inner, width = c.num_experts, c.moe_intermediate_size, c.hidden_size
        fused = base + "experts.gate_up_proj"
        if fused in self._left:
            gate_up = self._take(fused, (experts, 2 * inner, width))
            down = self._take(base + "experts.down_proj", (experts, width, inner))
        else:
            pairs = [self._gated_mlp(f"{base}experts.{e}.", inner) for e in range(experts)]
            gate_up = torch.stack([pair[0] for pair in pairs])
            down = torch.stack([pair[1] for pair in pairs])
        shared_up, shared_down = self._gated_mlp(
            base + "shared_expert.", c.shared_expert_intermediate_size
        )
        return MoeWeights(
            router=self._take(base + "gate.weight", (experts, width)),
            gate_up=gate_up,
            down=down,
            shared_gate_up=shared_up,
            shared_down=shared_down,
            shared_expert_gate=self._take(base + "shared_expert_gate.weight", (1, width)),
        )

    def _scale(self, name: str, width: int) -> Tensor:
        """A zero-centred norm weight [width] as float32 1 + w."""
        return 1.0 + self._take(name, (width,)).float()

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        header = self._left.pop(name, None)
        if header is None:
            raise ModelFormatError(f"the checkpoint lacks {name} {list(shape)}")
        if header.shape != shape:
            raise ModelFormatError(
                f"{name} has shape {list(header.shape)}, the config asks for {list(shape)}"
            )
        if header.dtype not in _FLOATS:
            raise ModelFormatError(f"{name} has dtype {header.dtype}; only floats are served")
        tensor = self._read(name, header)
        self._done += header.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor

    def _read(self, name: str, header: TensorHeader) -> Tensor:
        try:
            file = self._files.get(header.file)
            if file is None:
                file = self._files[header.file] = safe_open(header.file, "pt")
            # A copy: safetensors maps the file, and a file that is rewritten in place later would
            # change the weights under a running engine, or end it with SIGBUS.
            tensor: Tensor = file.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise ModelFormatError(f"{header.file} cannot be read at {name}: {error}") from error
        return tensor
