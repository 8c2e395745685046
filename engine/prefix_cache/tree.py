"""A radix tree over token blocks: every edge is one block of GRID tokens, every tenant has a root.

Knows ids of blocks and tokens; no tensors, no requests, and nothing of what lies in a checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.config import GRID
from engine.errors import InvariantError

# The GRID tokens of one block.
Key = tuple[int, ...]
NO_PLACE = -1


class BlockKeeper(Protocol):
    """The reference counts of KV blocks, as the tree uses them."""

    def holders(self, block: int) -> int:
        """How many hold the block, the tree included."""
        ...

    def keep(self, block: int) -> None:
        """The tree becomes a holder of a block that somebody holds."""
        ...

    def drop(self, block: int) -> bool:
        """The tree lets go of a block; True when it is free now."""
        ...


class Node:
    """One block of a prefix; the blocks before it are its ancestors.

    Attributes:
        parent: the node of the block before, or a root; None once it is out of the tree.
        end: tokens of the prefix up to and with this block.
        place: where the checkpoint of the state after `end` tokens lies, or NO_PLACE.
        drafted: the drafter's rows of the block are there too.
    """

    __slots__ = ("block", "children", "drafted", "end", "key", "parent", "place")

    def __init__(self, parent: Node | None, key: Key, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.end: int = 0 if parent is None else parent.end + GRID
        self.children: dict[Key, Node] = {}
        self.place = NO_PLACE
        self.drafted = False


class BlockTree:
    """The tree with the order in which its blocks were used last.

    Args:
        blocks: counts the tree as one holder of each of its blocks.
        forget: called for every node that leaves the tree.
    """

    def __init__(self, blocks: BlockKeeper, forget: Callable[[Node], None]) -> None:
        self._blocks = blocks
        self._forget = forget
        self._roots: dict[str | None, Node] = {}
        self._order: OrderedDict[Node, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._order)

    def blocks(self) -> Iterator[int]:
        """Every block that the tree holds."""
        return (node.block for node in self._order)

    def match(self, salt: str | None, keys: Sequence[Key]) -> list[Node]:
        """The longest path that begins with the blocks `keys`; changes nothing."""
        path: list[Node] = []
        node = self._roots.get(salt)
        for key in keys:
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def insert(
        self, salt: str | None, keys: Sequence[Key], blocks: Sequence[int]
    ) -> tuple[list[Node], list[Node]]:
        """Make the path of `keys` complete and the most recently used one.

        Args:
            salt: the tenant.
            keys: tokens by block.
            blocks: the KV block of each; one that the tree lacks is kept, one whose tokens it has
                already is not taken over.

        Returns:
            The path, and those of its nodes that are new.
        """
        path = self.match(salt, keys)
        fresh: list[Node] = []
        node = path[-1] if path else self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, (), -1)
        for key, block in zip(keys[len(path) :], blocks[len(path) : len(keys)], strict=True):
            self._blocks.keep(block)
            child = Node(node, key, block)
            node.children[key] = child
            self._order[child] = None
            fresh.append(child)
            node = child
        path += fresh
        self.touch(path)
        return path, fresh

    def touch(self, path: Sequence[Node]) -> None:
        """These were used just now; of a path the deepest node is the first to go again."""
        for node in reversed(path):
            self._order.move_to_end(node)

    def reclaim(self, count: int) -> int:
        """Let go of blocks that only the tree holds, least recently used first.

        Returns how many became free: `count`, unless there are fewer.
        """
        freed = 0
        for _ in range(len(self._order)):
            if freed >= count or not self._order:
                break
            node = next(iter(self._order))
            if self._blocks.holders(node.block) > 1:
                # In use just now, so that it is no candidate for a while.
                self._order.move_to_end(node)
                continue
            freed += self.remove(self._idle_end(node))
        return freed

    def remove(self, node: Node) -> int:
        """Take a node and all below it out of the tree; returns how many blocks became free."""
        parent = node.parent
        if parent is None:
            raise InvariantError("a node that is not in the tree cannot be removed from it")
        del parent.children[node.key]
        freed = 0
        below = [node]
        while below:
            gone = below.pop()
            below += gone.children.values()
            gone.children = {}
            gone.parent = None
            del self._order[gone]
            self._forget(gone)
            freed += self._blocks.drop(gone.block)
        if parent.parent is None and not parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}
        return freed

    def _idle_end(self, node: Node) -> Node:
        """The end of a path from `node` on through blocks that only the tree holds.

        Behind it only blocks in use can follow: sequences that computed a prefix themselves hold
        what lies behind it and not the prefix.
        """
        while True:
            idle = (c for c in node.children.values() if self._blocks.holders(c.block) == 1)
            below = next(idle, None)
            if below is None:
                return node
            node = below
