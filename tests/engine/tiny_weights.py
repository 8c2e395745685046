"""Config values and random tensors of tiny checkpoints, named as published; no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS = 4
HIDDEN = 8
VOCAB = 16
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 4, 3
INNER, EXPERTS, EXPERT_INNER, SHARED_INNER = 12, 3, 5, 6
CONV = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def text_config(family: str, **changes: Any) -> dict[str, Any]:
    """The text section of a config.json; a change to None takes the key away."""
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    if family.startswith("qwen3_5_moe") or family == "qwen3_next":
        values |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_INNER,
            "shared_expert_intermediate_size": SHARED_INNER,
        }
    else:
        values["intermediate_size"] = INNER
    return {key: value for key, value in (values | changes).items() if value is not None}


class Tensors:
    """Random tensors of the published names, each drawn from the hash-free order of its making."""

    def __init__(
        self, *, prefix: str = "model.", moe: bool = False, seed: int = 0, every: int = 4
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._moe = moe
        self._every = every
        self.prefix = prefix
        self.made: dict[str, Tensor] = {}

    def add(self, name: str, *shape: int) -> Tensor:
        self.made[name] = torch.randn(*shape, generator=self._generator)
        return self.made[name]

    def trunk(self, *, interleaved: bool = False, fused_experts: bool = True) -> dict[str, Tensor]:
        """All tensors of the trunk; every `every`-th layer is full attention."""
        self.add(self.prefix + "embed_tokens.weight", VOCAB, HIDDEN)
        self.add(self.prefix + "norm.weight", HIDDEN)
        self.add("lm_head.weight", VOCAB, HIDDEN)
        for index in range(LAYERS):
            base = f"{self.prefix}layers.{index}."
            self._norms(base)
            if (index + 1) % self._every:
                self._gdn(base + "linear_attn.", interleaved)
            else:
                self._attention(base + "self_attn.")
            self._mlp(base + "mlp.", fused_experts)
        return self.made

    def mtp(self, *, fused_experts: bool = True) -> dict[str, Tensor]:
        """The drafter's tensors beside what was made before."""
        self.add("mtp.fc.weight", HIDDEN, 2 * HIDDEN)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.add(f"mtp.{name}.weight", HIDDEN)
        self._norms("mtp.layers.0.")
        self._attention("mtp.layers.0.self_attn.")
        self._mlp("mtp.layers.0.mlp.", fused_experts)
        return self.made

    def _norms(self, base: str) -> None:
        self.add(base + "input_layernorm.weight", HIDDEN)
        self.add(base + "post_attention_layernorm.weight", HIDDEN)

    def _gdn(self, base: str, interleaved: bool) -> None:
        value = VALUE_HEADS * VALUE_DIM
        if interleaved:
            self.add(base + "in_proj_qkvz.weight", CONV + value, HIDDEN)
            self.add(base + "in_proj_ba.weight", 2 * VALUE_HEADS, HIDDEN)
        else:
            self.add(base + "in_proj_qkv.weight", CONV, HIDDEN)
            self.add(base + "in_proj_z.weight", value, HIDDEN)
            self.add(base + "in_proj_b.weight", VALUE_HEADS, HIDDEN)
            self.add(base + "in_proj_a.weight", VALUE_HEADS, HIDDEN)
        self.add(base + "conv1d.weight", CONV, 1, 4)
        self.add(base + "A_log", VALUE_HEADS)
        self.add(base + "dt_bias", VALUE_HEADS)
        self.add(base + "norm.weight", VALUE_DIM)
        self.add(base + "out_proj.weight", HIDDEN, value)

    def _attention(self, base: str) -> None:
        self.add(base + "q_proj.weight", 2 * HEADS * HEAD_DIM, HIDDEN)
        self.add(base + "k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        self.add(base + "v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        self.add(base + "o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        self.add(base + "q_norm.weight", HEAD_DIM)
        self.add(base + "k_norm.weight", HEAD_DIM)

    def _mlp(self, base: str, fused_experts: bool) -> None:
        if not self._moe:
            self._gated(base, INNER)
            return
        self.add(base + "gate.weight", EXPERTS, HIDDEN)
        self.add(base + "shared_expert_gate.weight", 1, HIDDEN)
        self._gated(base + "shared_expert.", SHARED_INNER)
        gate_up = self.add(base + "experts.gate_up_proj", EXPERTS, 2 * EXPERT_INNER, HIDDEN)
        down = self.add(base + "experts.down_proj", EXPERTS, HIDDEN, EXPERT_INNER)
        if fused_experts:
            return
        del self.made[base + "experts.gate_up_proj"], self.made[base + "experts.down_proj"]
        for expert in range(EXPERTS):
            name = f"{base}experts.{expert}."
            self.made[name + "gate_proj.weight"] = gate_up[expert, :EXPERT_INNER].clone()
            self.made[name + "up_proj.weight"] = gate_up[expert, EXPERT_INNER:].clone()
            self.made[name + "down_proj.weight"] = down[expert].clone()

    def _gated(self, base: str, inner: int) -> None:
        self.add(base + "gate_proj.weight", inner, HIDDEN)
        self.add(base + "up_proj.weight", inner, HIDDEN)
        self.add(base + "down_proj.weight", HIDDEN, inner)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A model folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> list[Path]:
    """A model folder with two safetensors files and their index; gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files, places = [], {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = folder / f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file)
        places |= dict.fromkeys(part, file.name)
        files.append(file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files
