"""Reference counts of KV block ids. Knows no tensors, no tokens and no policy."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InvariantError


class BlockAllocator:
    """Hands out KV blocks 0..count-1; a block is free again when its last holder lets go."""

    __slots__ = ("_free", "_holders")

    def __init__(self, count: int) -> None:
        # A stack whose top is the block freed last, which is the likeliest to be in the CPU cache.
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def total(self) -> int:
        """Blocks in all."""
        return len(self._holders)

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds; a shared block counts once."""
        return len(self._holders) - len(self._free)

    def holders(self, block: int) -> int:
        """How many hold `block`."""
        return self._holders[block]

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, or none at all and return None when fewer are free."""
        free = self._free
        if count > len(free):
            return None
        taken = tuple(free.pop() for _ in range(count))
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block.

        Raises:
            InvariantError: a block is free, so its content belongs to nobody.
        """
        for block in blocks:
            if self._holders[block] == 0:
                raise InvariantError(f"KV block {block} is free and cannot be shared")
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block.

        Raises:
            InvariantError: a block is freed more often than it was taken.
        """
        for block in blocks:
            if self._holders[block] == 0:
                raise InvariantError(f"KV block {block} is free already")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
