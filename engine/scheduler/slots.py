"""Who owns which state slot. Knows ids and owners only, no tensors and no scheduling policy."""

from __future__ import annotations

from bisect import insort

from engine.errors import InvariantError


class SlotAllocator:
    """Hands out state slots 0..count-1, always the lowest free one.

    An owner (a request id) holds at most one slot and a slot has at most one owner; a call that
    would break this raises InvariantError, because it is a bug and never a user's mistake.
    """

    __slots__ = ("_free", "_owner_of", "_slot_of")

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._owner_of: list[int | None] = [None] * count
        self._slot_of: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Slots in all."""
        return len(self._owner_of)

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that somebody owns."""
        return len(self._slot_of)

    def owner_of(self, slot: int) -> int | None:
        """The owner of `slot`, or None when it is free."""
        return self._owner_of[slot]

    def lowest_free(self) -> int | None:
        """The lowest slot that nobody owns, or None when all are taken."""
        return self._free[0] if self._free else None

    def highest_used(self) -> int | None:
        """The highest slot that somebody owns, or None when all are free."""
        return max(self._slot_of.values(), default=None)

    def claim(self, owner: int) -> int:
        """Give the lowest free slot to `owner`.

        Raises:
            InvariantError: no slot is free, or the owner holds one already.
        """
        if owner in self._slot_of:
            raise InvariantError(f"request {owner} already owns slot {self._slot_of[owner]}")
        if not self._free:
            raise InvariantError(f"request {owner} wants a slot and all {self.total} are taken")
        slot = self._free.pop(0)
        self._owner_of[slot] = owner
        self._slot_of[owner] = slot
        return slot

    def release(self, slot: int, owner: int) -> None:
        """Take `slot` back from `owner`.

        Raises:
            InvariantError: the slot is not this owner's.
        """
        self._expect_owner(slot, owner)
        self._owner_of[slot] = None
        del self._slot_of[owner]
        insort(self._free, slot)

    def move(self, src: int, dst: int, owner: int) -> None:
        """Exchange the owner's slot `src` for the free slot `dst`.

        Raises:
            InvariantError: `src` is not this owner's or `dst` is taken.
        """
        self._expect_owner(src, owner)
        if self._owner_of[dst] is not None:
            raise InvariantError(
                f"slot {dst} belongs to request {self._owner_of[dst]} and cannot take {owner}"
            )
        self._free.remove(dst)
        self._owner_of[dst] = owner
        self._slot_of[owner] = dst
        self._owner_of[src] = None
        insort(self._free, src)

    def _expect_owner(self, slot: int, owner: int) -> None:
        if self._owner_of[slot] != owner:
            raise InvariantError(
                f"slot {slot} belongs to request {self._owner_of[slot]}, not to {owner}"
            )
