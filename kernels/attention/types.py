"""What every form of the attention mixer takes: one layer's parameters and its KV pages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Small parameters of one layer and the rotary table of the model, float32.

    Attributes:
        q_norm, k_norm: [head_dim] scales, 1 + w folded.
        cos, sin: [max_seq_len, rotary_dim / 2].
        heads, kv_heads, head_dim: nH, nKV, hd.
        eps: of the norms.
    """

    q_norm: Tensor
    k_norm: Tensor
    cos: Tensor
    sin: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class KvPages:
    """One layer's pages of P tokens; the last block is a dummy for padding.

    Attributes:
        k: [blocks + 1, nKV, hd, P], tokens innermost, so that scores need no reduction.
        v: [blocks + 1, nKV, P, hd].
    """

    k: Tensor
    v: Tensor
