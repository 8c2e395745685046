"""The recurrent state of every slot and GDN layer, with the ring and snapshots of verified rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.pools.shapes import FLOAT32_BYTES, StatePoolShapes, VerifyPoolShapes
from engine.transfer import send
from kernels.gdn.types import GdnState
from kernels.moves.naive import MoveRows
from kernels.moves.naive import move_rows as naive_move_rows


class SsmStatePool:
    """State tensors of `slots` sequences and a dummy slot, the last, for padding.

    Attributes:
        h: [layers, slots + 1, Hv, Dk, Dv] float32, or float16 under f16-pool.
        conv: [layers, slots + 1, conv_dim, kernel] float32, newest input last.
        ring_inputs: [layers, ring slots, drafts, width], ring_gates: [.., drafts, 2, Hv].
        checkpoint_h, checkpoint_conv, snapshot_h, snapshot_conv: see VerifyPoolShapes.
        first_place: of each covered slot in snapshot_h.
        stage: [slots + 1, Hv, Dk, Dv] float32 that every layer runs its rows in, under f16-pool.
        pending: [slots + 1] rows in each slot's ring that are accepted but not yet folded into h.
        bytes_moved: of state read and written so far, by every operation on it.
        h_bytes, conv_bytes, blob_bytes, ring_row_bytes: of one slot's h, conv state and both, and
            of one row of its ring, over all layers.
    """

    def __init__(
        self,
        shapes: StatePoolShapes,
        verify: VerifyPoolShapes,
        device: torch.device,
        move_rows: MoveRows = naive_move_rows,
    ) -> None:
        def zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        h = torch.float16 if shapes.h_f16 else torch.float32
        self.h = zeros(shapes.h, h)
        self.stage = zeros(shapes.stage) if shapes.h_f16 else None
        self.conv = zeros(shapes.conv)
        self.ring_inputs = zeros(shapes.ring_inputs)
        self.ring_gates = zeros(shapes.ring_gates)
        self.checkpoint_h = zeros(verify.checkpoint_h, h)
        self.checkpoint_conv = zeros(verify.checkpoint_conv)
        self.snapshot_h = zeros(verify.snapshot_h, h)
        self.snapshot_conv = zeros(verify.snapshot_conv)
        self.first_place = verify.first_place
        self.pending: npt.NDArray[np.int64] = np.zeros(shapes.h[1], np.int64)
        self.bytes_moved = 0
        self._move_rows = move_rows
        # Every step counts with these, and asking a tensor for its size takes microseconds.
        layers, _, _, width = shapes.ring_inputs
        self.h_bytes = self.h[:, 0].numel() * self.h.element_size()
        self.conv_bytes = self.conv[:, 0].numel() * FLOAT32_BYTES
        self.blob_bytes = self.h_bytes + self.conv_bytes
        self.ring_row_bytes = layers * (width + 2 * self.h.shape[2]) * FLOAT32_BYTES

    def layer(self, index: int) -> GdnState:
        """Views of GDN layer number `index`, counted among GDN layers only."""
        return GdnState(
            self.h[index],
            self.conv[index],
            self.ring_inputs[index],
            self.ring_gates[index],
            self.snapshot_h[index],
            self.snapshot_conv[index],
            self.stage,
        )

    @property
    def ring_slots(self) -> int:
        """Slots that have a ring, dummy included."""
        return int(self.ring_inputs.shape[1])

    def claim(self, slot: int) -> None:
        """A new sequence takes the slot; its first row, row 0, sees the state as zero."""
        self.pending[slot] = 0

    def copy(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        src: Sequence[int],
        dst: Sequence[int],
    ) -> None:
        """targets[i][:, dst] = sources[i][:, src]; the host does not wait for the device."""
        (index,) = send(self.h.device, np.array((src, dst), np.int64))
        self._move_rows(sources, targets, index[0], index[1])

    def move(self, src: int, dst: int) -> None:
        """Copy all that belongs to the sequence in `src` into `dst`, which is lower."""
        tensors = [self.h, self.conv]
        self.bytes_moved += 2 * self.blob_bytes
        rows = int(self.pending[src])
        if rows:
            tensors += [self.ring_inputs[:, :, :rows], self.ring_gates[:, :, :rows]]
            self.bytes_moved += 2 * rows * self.ring_row_bytes
        self.copy(tensors, tensors, [src], [dst])
        self.pending[dst] = rows
        self.pending[src] = 0

    def warm_up(self) -> None:
        """Move slot 0 onto itself, without and with a pending row, so that no move compiles later.

        Before any sequence: what is pending in slot 0 is forgotten, and no byte is counted.
        """
        counted = self.bytes_moved
        for pending in range(1 + min(1, self.ring_inputs.shape[1] * self.ring_inputs.shape[2])):
            self.pending[0] = pending
            self.move(0, 0)
        self.bytes_moved = counted

    @property
    def nbytes(self) -> int:
        """Bytes of h and conv, dummy slot included."""
        return self.h.nbytes + self.conv.nbytes

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring, its dummy slot included."""
        return (self.ring_inputs.numel() + self.ring_gates.numel()) * FLOAT32_BYTES

    @property
    def verify_bytes(self) -> int:
        """Bytes of checkpoints and snapshots, dummies included."""
        tensors = (
            self.checkpoint_h,
            self.checkpoint_conv,
            self.snapshot_h,
            self.snapshot_conv,
        )
        return sum(t.nbytes for t in tensors)
