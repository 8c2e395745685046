"""Tiny random checkpoints of every family, made by transformers, and its answers for them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Its advice to install faster kernels would be a warning in every test.
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCAB = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "full_attention_interval": 4,
}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
_MROPE: dict[str, Any] = _ROPE | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}


@dataclass(frozen=True)
class Oracle:
    """A checkpoint folder with the transformers model and the drafter tensors that it holds."""

    folder: Path
    model: Any
    mtp: dict[str, Tensor]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), vocabulary] of a whole prompt."""
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> Tensor:
        """[len(ids), hidden] after the final norm."""
        return self.model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def states(self, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
        """(recurrent [Hv, Dk, Dv], conv [conv_dim, kernel]) of every GDN layer after the prompt."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config.get_text_config())
        self.model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
        return [
            (layer.recurrent_states[0][0], layer.conv_states[0][0])
            for layer in cache.layers
            if hasattr(layer, "recurrent_states")
        ]

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The next `count` tokens, end ids ignored."""
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return [int(token) for token in out[0, len(ids) :]]


def make(
    folder: Path,
    family: str,
    ratio: int,
    *,
    tied: bool = False,
    bf16: bool = False,
    seed: int = 3,
) -> Oracle:
    """Write a checkpoint of `family` with HV / HK = ratio into folder; its model is float32.

    The seeds that the tests use give models in which transformers' chunked and recurrent forms
    agree to about 1e-4; in others (seed 0) they differ by 9e-4, more than any tolerance.
    """
    import transformers as tf

    common = _COMMON | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * ratio,
        "tie_word_embeddings": tied,
    }
    classes = {
        "qwen3_5": lambda: tf.Qwen3_5ForCausalLM(
            tf.Qwen3_5TextConfig(intermediate_size=128, rope_parameters=dict(_MROPE), **common)
        ),
        "qwen3_5_moe": lambda: tf.Qwen3_5MoeForCausalLM(
            tf.Qwen3_5MoeTextConfig(rope_parameters=dict(_MROPE), **common, **_MOE)
        ),
        "qwen3_next": lambda: tf.Qwen3NextForCausalLM(
            tf.Qwen3NextConfig(intermediate_size=128, rope_parameters=dict(_ROPE), **common, **_MOE)
        ),
    }
    torch.manual_seed(0)
    model = classes[family]().eval().float()
    model.config._attn_implementation = "eager"
    _randomise(model, bf16, seed)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    mtp = _mtp_tensors(model.config, moe=family != "qwen3_5", bf16=bf16)
    tensors |= mtp
    if bf16:
        keep = ("A_log", "linear_attn.norm.weight")
        tensors = {k: v if k.endswith(keep) else v.bfloat16() for k, v in tensors.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(config))
    return Oracle(folder, model, mtp)


def _randomise(model: Any, bf16: bool, seed: int) -> None:
    """Norms, dt_bias and A_log away from their defaults, or errors in them stay invisible."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.01, 4.0, generator=g).log())
            elif name.endswith("dt_bias"):
                p.copy_(torch.randn(p.shape, generator=g) * 0.5)
            elif p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
            else:
                p.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5)
            if bf16 and not name.endswith(("A_log", "linear_attn.norm.weight")):
                p.copy_(_both_halves(p))


def _both_halves(x: Tensor) -> Tensor:
    """Rounded so that bfloat16 and fp16 both hold it exactly: then the CPU packs it as fp16."""
    return x.bfloat16().half().float()


def _mtp_tensors(c: Any, *, moe: bool, bf16: bool) -> dict[str, Tensor]:
    width, dim, heads, kv = (
        c.hidden_size,
        c.head_dim,
        c.num_attention_heads,
        c.num_key_value_heads,
    )
    g = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) / shape[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return torch.randn(size, generator=g) * 0.1

    def gated(base: str, inner: int) -> dict[str, Tensor]:
        return {
            base + "gate_proj.weight": matrix(inner, width),
            base + "up_proj.weight": matrix(inner, width),
            base + "down_proj.weight": matrix(width, inner),
        }

    base = "mtp.layers.0."
    tensors = {
        "mtp.fc.weight": matrix(width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": norm(width),
        "mtp.pre_fc_norm_hidden.weight": norm(width),
        "mtp.norm.weight": norm(width),
        base + "input_layernorm.weight": norm(width),
        base + "post_attention_layernorm.weight": norm(width),
        base + "self_attn.q_proj.weight": matrix(2 * heads * dim, width),
        base + "self_attn.k_proj.weight": matrix(kv * dim, width),
        base + "self_attn.v_proj.weight": matrix(kv * dim, width),
        base + "self_attn.o_proj.weight": matrix(width, heads * dim),
        base + "self_attn.q_norm.weight": norm(dim),
        base + "self_attn.k_norm.weight": norm(dim),
    }
    if moe:
        tensors[base + "mlp.gate.weight"] = matrix(c.num_experts, width)
        tensors[base + "mlp.shared_expert_gate.weight"] = matrix(1, width)
        tensors |= gated(base + "mlp.shared_expert.", c.shared_expert_intermediate_size)
        for e in range(c.num_experts):
            tensors |= gated(f"{base}mlp.experts.{e}.", c.moe_intermediate_size)
    else:
        tensors |= gated(base + "mlp.", c.intermediate_size)
    return {k: _both_halves(v) if bf16 else v for k, v in tensors.items()}
