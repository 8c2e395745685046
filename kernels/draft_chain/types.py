"""The weights of an MTP head as the chain takes them, and what it starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.types import AttentionParams, KvPages

Int64 = NDArray[np.int64]
Drafts = tuple[Int64, NDArray[np.floating[Any]]]


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
    """R rows of B sequences, a sequence's side by side; the last of each is where drafts begin.

    It lives on the host, and its index arrays are numpy's int64.

    Attributes:
        tokens: [R] the token after each row.
        hidden: [N, H] float32, those of a sequence's rows from its `first_hidden` on.
        row_start: [B + 1] first row of each sequence, then R; begins: [B] that row's position.
        first_hidden: [B] where the sequence's hidden states begin.
        block_tables: [B, T]; first_key: [B] see kernels.batch.
        depths: [B] drafts of each sequence, at least one of them above 0.
    """

    tokens: Int64
    hidden: Tensor
    row_start: Int64
    begins: Int64
    first_hidden: Int64
    block_tables: Int64
    first_key: Int64
    depths: Int64

    def owners(self) -> Int64:
        """[R] the sequence of each row."""
        return np.repeat(np.arange(len(self.depths)), np.diff(self.row_start))

    def positions(self) -> Int64:
        """[R] of the rows."""
        return self._counted_from(self.begins)

    def hidden_rows(self) -> Int64:
        """[R] where in `hidden` each row's is."""
        return self._counted_from(self.first_hidden)

    def _counted_from(self, first: Int64) -> Int64:
        """[R] numbers that begin at first [B] in each sequence and count up."""
        offsets = first - self.row_start[:-1]
        return np.arange(len(self.tokens)) + offsets[self.owners()]


Chain = Callable[[ChainStart], Drafts]
