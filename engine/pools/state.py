"""The recurrent state of every slot and GDN layer, with the carry ring of unfolded rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.pools.shapes import StatePoolShapes
from kernels.gdn.types import GdnState


class SsmStatePool:
    """State tensors of `slots` sequences and a dummy slot, the last, for padding.

    Attributes:
        h: [layers, slots + 1, Hv, Dk, Dv] float32.
        conv: [layers, slots + 1, conv_dim, kernel] float32, newest input last.
        ring_inputs: [layers, ring slots, drafts, conv_dim], ring_gates: [.., drafts, 2, Hv].
        pending: [slots + 1] rows in each slot's ring that are accepted but not yet folded into h.
    """

    def __init__(self, shapes: StatePoolShapes, device: torch.device) -> None:
        def zeros(shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.h = zeros(shapes.h)
        self.conv = zeros(shapes.conv)
        self.ring_inputs = zeros(shapes.ring_inputs)
        self.ring_gates = zeros(shapes.ring_gates)
        self.pending: npt.NDArray[np.int64] = np.zeros(shapes.h[1], np.int64)

    def layer(self, index: int) -> GdnState:
        """Views of GDN layer number `index`, counted among GDN layers only."""
        return GdnState(
            self.h[index], self.conv[index], self.ring_inputs[index], self.ring_gates[index]
        )

    def claim(self, slot: int) -> None:
        """A new sequence takes the slot; its first row, row 0, sees the state as zero."""
        self.pending[slot] = 0

    def move(self, src: int, dst: int) -> None:
        """Copy all that belongs to the sequence in `src` into `dst`."""
        self.h[:, dst] = self.h[:, src]
        self.conv[:, dst] = self.conv[:, src]
        covered = self.ring_inputs.shape[1]
        if src < covered and dst < covered:
            self.ring_inputs[:, dst] = self.ring_inputs[:, src]
            self.ring_gates[:, dst] = self.ring_gates[:, src]
        self.pending[dst] = self.pending[src]
        self.pending[src] = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors, dummy slot and ring included."""
        tensors = (self.h, self.conv, self.ring_inputs, self.ring_gates)
        return sum(t.numel() * t.element_size() for t in tensors)
