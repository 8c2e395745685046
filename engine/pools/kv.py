"""Paged keys and values of the attention layers; one more layer when the drafter runs."""

from __future__ import annotations

import torch

from engine.pools.shapes import KvPoolShapes
from kernels.attention.types import KvPages


class KvPool:
    """Pages in blocks; the last block is a dummy for padding.

    Attributes:
        k, v: see KvPoolShapes; `dtype` is that of the activations.
    """

    def __init__(self, shapes: KvPoolShapes, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros and not empty: the first touch of the pages happens at start-up, not in a step.
        self.k = torch.zeros(shapes.k, dtype=dtype, device=device)
        self.v = torch.zeros(shapes.v, dtype=dtype, device=device)

    def layer(self, index: int) -> KvPages:
        """Views of attention layer number `index`, counted among attention layers only."""
        return KvPages(self.k[index], self.v[index])

    @property
    def blocks(self) -> int:
        """Blocks that sequences may own."""
        return int(self.k.shape[1]) - 1

    @property
    def dummy_block(self) -> int:
        """The block that padding points to."""
        return self.blocks

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, the dummy block included."""
        return self.k.numel() * self.k.element_size() + self.v.numel() * self.v.element_size()
