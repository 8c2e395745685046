"""The weights of an MTP head as the chain takes them, and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """Matrices in bfloat16, [out, in]; norm scales in float32 with 1 + w folded.

    Attributes:
        embed: [V, H]; fc: [H, 2 H] over (embedding, hidden).
        qkv: [2 nH hd + 2 nKV hd, H], rows [q | gate | k | v]; o: [H, nH hd].
        gate_up: [2 I, H]; down: [H, I]; head: [V, H].
        norm_embedding, norm_hidden, input_norm, post_norm, norm: [H].
        attention: norms and rotary tables of the layer; pages: its KV.
    """

    embed: Tensor
    fc: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    head: Tensor
    norm_embedding: Tensor
    norm_hidden: Tensor
    input_norm: Tensor
    post_norm: Tensor
    norm: Tensor
    attention: AttentionParams
    pages: KvPages

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that a row reads whole."""
        parts = (self.fc, self.qkv, self.o, self.gate_up, self.down, self.head)
        return sum(part.numel() * part.element_size() for part in parts)


@dataclass(frozen=True, slots=True)
class ChainStart:
    """B sequences, int64 unless said: the first re-fed row of each.

    Attributes:
        tokens: [B] the draft before it; hidden: [B, H] float32 of that draft's row.
        positions: [B] of the row.
        block_tables: [B, T]; first_key: [B] see kernels.batch.
    """

    tokens: Tensor
    hidden: Tensor
    positions: Tensor
    block_tables: Tensor
    first_key: Tensor
