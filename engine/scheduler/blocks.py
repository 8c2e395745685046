"""Reference counts of KV block ids, those of a cache apart. Knows no tensors, tokens or policy."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InvariantError


class BlockAllocator:
    """Hands out KV blocks 0..count-1; a block is free again when its last holder lets go.

    One holder of a block may be a cache (`keep`, `drop`). A block that only the cache holds is
    idle: nobody needs it, and the cache can be asked to drop it.
    """

    __slots__ = ("_cached", "_free", "_holders", "_idle")

    def __init__(self, count: int) -> None:
        # A stack whose top is the block freed last, which is the likeliest to be in the CPU cache.
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._cached = [False] * count
        self._idle = 0

    @property
    def total(self) -> int:
        """Blocks in all."""
        return len(self._holders)

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Blocks that only the cache holds."""
        return self._idle

    @property
    def available(self) -> int:
        """Blocks that are free or would be if the cache dropped them."""
        return len(self._free) + self._idle

    @property
    def used(self) -> int:
        """Blocks that somebody beside the cache holds; a shared block counts once."""
        return len(self._holders) - len(self._free) - self._idle

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
            if self._cached[block] and self._holders[block] == 1:
                self._idle -= 1
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block.

        Raises:
            InvariantError: a block is freed more often than it was taken.
        """
        for block in blocks:
            left = self._holders[block] - 1
            if left < self._cached[block]:
                raise InvariantError(f"KV block {block} is free already")
            self._holders[block] = left
            if left == 0:
                self._free.append(block)
            elif left == 1 and self._cached[block]:
                self._idle += 1

    def keep(self, block: int) -> None:
        """The cache becomes one more holder of a block.

        Raises:
            InvariantError: nobody holds it, or the cache does already.
        """
        if self._cached[block] or self._holders[block] == 0:
            state = "cached already" if self._cached[block] else "free"
            raise InvariantError(f"KV block {block} is {state} and cannot be cached")
        self._cached[block] = True
        self._holders[block] += 1

    def drop(self, block: int) -> bool:
        """The cache lets go of a block; True when it is free now.

        Raises:
            InvariantError: the cache does not hold it.
        """
        if not self._cached[block]:
            raise InvariantError(f"KV block {block} is not cached")
        self._cached[block] = False
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        self._idle -= 1
        self._free.append(block)
        return True
