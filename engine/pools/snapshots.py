"""Whole states of single slots, set aside by place: copied out of a slot, and back into one.

Knows neither why a state is kept nor which tokens led to it.
"""

from __future__ import annotations

from engine.errors import InvariantError
from engine.pools.state import SsmStatePool


class StateSnapshots:
    """Room for `places` copies of one slot's h and conv over all layers.

    Args:
        states: whose slots are copied.
        places: how many copies there is room for; 0 takes no memory.

    Attributes:
        h: [places, layers, Hv, Dk, Dv], conv: [places, layers, conv_dim, kernel], in the types of
            the state pool.
    """

    def __init__(self, states: SsmStatePool, places: int) -> None:
        def shape(pool_shape: tuple[int, ...]) -> tuple[int, ...]:
            layers, _, *rest = pool_shape
            return (places, layers, *rest)

        self._states = states
        # Zeros and not empty: the first touch of the memory happens at start-up, not in a step.
        self.h = states.h.new_zeros(shape(tuple(states.h.shape)))
        self.conv = states.conv.new_zeros(shape(tuple(states.conv.shape)))

    @property
    def places(self) -> int:
        """Copies that there is room for."""
        return int(self.h.shape[0])

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
        self.h[place] = states.h[:, slot]
        self.conv[place] = states.conv[:, slot]
        states.bytes_moved += 2 * states.blob_bytes

    def load(self, place: int, slot: int) -> None:
        """Copy what lies at `place` into `slot`, whose pending rows are forgotten."""
        states = self._states
        states.h[:, slot] = self.h[place]
        states.conv[:, slot] = self.conv[place]
        states.pending[slot] = 0
        states.bytes_moved += 2 * states.blob_bytes
