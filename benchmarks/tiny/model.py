"""The network of spark-tiny in training: transformers' Qwen3.5 trunk and a re-fed MTP head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

END_OF_TEXT, END_OF_TURN = 2039, 2041


def make_config() -> Qwen3_5TextConfig:
    """The configuration that ships with the checkpoint."""
    return Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        intermediate_size=512,
        tie_word_embeddings=True,
        full_attention_interval=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        attn_output_gate=True,
        mamba_ssm_dtype="float32",
        dtype="bfloat16",
        architectures=["Qwen3_5ForCausalLM"],
    )


def make_trunk(seed: int) -> Qwen3_5ForCausalLM:
    """A freshly initialised trunk in float32."""
    torch.manual_seed(seed)
    config = make_config()
    config.dtype = torch.float32
    trunk = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, p in trunk.named_parameters():
            if p.ndim == 2:
                p.normal_(std=0.1 if "embed" in name else p.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                p.mul_(0.15)  # small against the embedding, which has to stay readable
            if name.endswith("dt_bias"):  # decay times between a few and a few hundred tokens
                p.copy_(torch.linspace(-5.0, -2.0, p.numel()))
            if name.endswith("A_log"):
                p.zero_()
        for layer in trunk.model.layers:
            if hasattr(layer, "linear_attn"):
                _ready_to_recall(layer.linear_attn)
    return trunk


def _ready_to_recall(mixer: modeling_qwen3_5.Qwen3_5GatedDeltaNet) -> None:
    """Start a GDN layer as an associative memory: what followed the last time this token was here.

    Queries and keys share their projection; the convolution passes the current token to queries and
    values and the one before it to keys. A run from a random start, which also lacked the copying
    mix of the corpus, copied nothing after 1200 steps; the two were not measured apart.
    """
    size = mixer.key_dim
    mixer.in_proj_qkv.weight[size : 2 * size] = mixer.in_proj_qkv.weight[:size]
    taps = mixer.conv1d.weight  # [channels, 1, 4], the last tap is the current token
    taps.normal_(std=0.1)
    taps[:, 0, 3] += 1.0
    half = size + size // 2
    taps[size:half, 0, 2] += 1.0
    taps[size:half, 0, 3] -= 1.0
    taps[half : 2 * size, 0, 2] += 0.5


def keep_delta_rule_in_float32() -> None:
    """Run the chunk rule outside autocast; its triangular solve loses too much in bfloat16."""
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def in_float32(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return original(*args, **kwargs)

    modeling_qwen3_5.torch_chunk_gated_delta_rule = in_float32


class Norm(nn.Module):
    """Zero-centred RMSNorm: the weight is stored minus one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class MtpAttention(nn.Module):
    """Gated attention of the MTP layer over first-depth rows and the re-fed rows of one chain."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, kv_width = self.heads * self.dim, self.kv_heads * self.dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)
        rotary = int(self.dim * 0.25)
        inverse = 10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary)
        self.inverse: Tensor
        self.register_buffer("inverse", inverse, persistent=False)

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        """RoPE on the first quarter of each head; x [B, T, heads, dim], positions from `first`."""
        angle = (torch.arange(x.shape[1]) + first)[:, None].float() * self.inverse
        cos, sin = (torch.cat([f, f], -1)[None, :, None] for f in (angle.cos(), angle.sin()))
        n = 2 * angle.shape[1]
        head, tail = x[..., :n], x[..., n:]
        turned = torch.cat([-head[..., n // 2 :], head[..., : n // 2]], -1)
        return torch.cat([head * cos + turned * sin, tail], -1)

    def forward(self, x: Tensor, depth: int, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One depth, x [B, T, H]; appends its keys and values to `rows`, from depth 0 on."""
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, self.heads, 2 * self.dim).chunk(2, -1)
        k = self._rotate(self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)), depth)
        q = self._rotate(self.q_norm(q), depth)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).float()
        group = self.heads // self.kv_heads
        rows.append((k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        with torch.autocast("cpu", enabled=False):
            keys, values = rows[0]
            scores = torch.einsum("bqhd,bkhd->bhqk", q, keys)
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
            own = [(q * key).sum(-1).transpose(1, 2)[..., None] for key, _ in rows[1:]]
            weights = (torch.cat([scores, *own], -1) * self.dim**-0.5).softmax(-1)
            out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :t], values)
            for i, (_, value) in enumerate(rows[1:]):
                out = out + weights[..., t + i].transpose(1, 2)[..., None] * value
        out = out * torch.sigmoid(gate.float())
        return self.o_proj(out.reshape(b, t, -1))  # type: ignore[no-any-return]


class MtpMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class MtpLayer(nn.Module):
    """The one decoder layer of the MTP head."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(config.hidden_size),
            Norm(config.hidden_size),
        )
        self.self_attn, self.mlp = MtpAttention(config), MtpMlp(config)

    def forward(self, x: Tensor, depth: int, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), depth, rows)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class MtpHead(nn.Module):
    """Names of its parameters are those of the checkpoint after `mtp.`."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            Norm(size),
            Norm(size),
            Norm(size),
        )
        self.layers = nn.ModuleList([MtpLayer(config)])

    def forward(
        self, tokens: Tensor, hidden: Tensor, embedding: Tensor, depths: int
    ) -> list[Tensor]:
        """Hidden rows after `norm`, one tensor [B, T - depths, H] per depth.

        Row p of depth j (from 0) has read token p + 1 + j and is meant to predict token p + 2 + j.

        tokens: [B, T] ids. hidden: [B, T, H] of the trunk after its final norm. embedding: [V, H].
        """
        n, out = tokens.shape[1] - depths, []
        state, rows = hidden[:, :n], []  # type: ignore[var-annotated]
        for depth in range(depths):
            seen = F.embedding(tokens[:, 1 + depth : 1 + depth + n], embedding)
            x = self.fc(
                torch.cat([self.pre_fc_norm_embedding(seen), self.pre_fc_norm_hidden(state)], -1)
            ).float()
            state = self.norm(self.layers[0](x, depth, rows))
            out.append(state)
        return out


def make_mtp(seed: int) -> MtpHead:
    """A freshly initialised MTP head in float32."""
    torch.manual_seed(seed)
    head = MtpHead(make_config())
    with torch.no_grad():
        for name, p in head.named_parameters():
            if p.ndim == 2:
                p.normal_(
                    std=p.shape[1] ** -0.5
                    * (0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
                )
    return head
