"""Whole states of single slots, set aside by place: copied out of a slot, and back into one.

Knows neither why a state is kept nor which tokens led to it.
"""

from __future__ import annotations

from torch import Tensor

from engine.errors import InvariantError
from engine.pools.state import SsmStatePool


class StateSnapshots:
    """Room for `places` copies of one slot's h and conv over all layers.

    Args:
        states: whose slots are copied.
        places: how many copies there is room for; 0 takes no memory.

    Attributes:
        h: [layers, places, Hv, Dk, Dv], conv: [layers, places, conv_dim, kernel], in the types of
            the state pool.
    """

    def __init__(self, states: SsmStatePool, places: int) -> None:
        def zeros(pool: Tensor) -> Tensor:
            layers, _, *rest = pool.shape
            # Zeros and not empty: the first touch of the memory is at start-up, not in a step.
            return pool.new_zeros((layers, places, *rest))

        self._states = states
        self.h = zeros(states.h)
        self.conv = zeros(states.conv)

    @property
    def places(self) -> int:
        """Copies that there is room for."""
        return int(self.h.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        h, conv = self.h, self.conv
        return h.numel() * h.element_size() + conv.numel() * conv.element_size()

    def save(self, slot: int, place: int) -> None:
        """Copy the state in `slot` to `place`.

        Raises:
            InvariantError: rows of the slot are pending, so that its state is an older one; fold
                them first.
        """
        states = self._states
        if states.pending[slot]:
            raise InvariantError(
                f"slot {slot} has {states.pending[slot]} pending rows and cannot be copied"
            )
        self.put((states.h, slot), (states.conv, slot), place)

    def put(self, h: tuple[Tensor, int], conv: tuple[Tensor, int], place: int) -> None:
        """Copy a state to `place` from rows of tensors of the pool's kind: (tensor, row) of each.

        h: [layers, rows, Hv, Dk, Dv], conv: [layers, rows, conv_dim, kernel].
        """
        states = self._states
        if h[1] == conv[1]:
            states.copy((h[0], conv[0]), (self.h, self.conv), [h[1]], [place])
        else:
            states.copy((h[0],), (self.h,), [h[1]], [place])
            states.copy((conv[0],), (self.conv,), [conv[1]], [place])
        states.bytes_moved += 2 * states.blob_bytes

    def load(self, place: int, slot: int) -> None:
        """Copy what lies at `place` into `slot`, whose pending rows are forgotten."""
        states = self._states
        states.copy((self.h, self.conv), (states.h, states.conv), [place], [slot])
        states.pending[slot] = 0
        states.bytes_moved += 2 * states.blob_bytes

    def swap(self, slot: int, place: int) -> None:
        """Exchange the state in `slot` for what lies at `place`, one layer after the other."""
        states = self._states
        for pool, kept in ((states.h, self.h), (states.conv, self.conv)):
            for layer in range(pool.shape[0]):
                here = pool[layer, slot].clone()
                pool[layer, slot] = kept[layer, place]
                kept[layer, place] = here
        states.bytes_moved += 4 * states.blob_bytes
