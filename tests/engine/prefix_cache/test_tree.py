"""The tree by hand: what matches, which block goes first, what leaves with it."""

from collections.abc import Sequence

import pytest

from engine.config import GRID
from engine.errors import InvariantError
from engine.prefix_cache.tree import BlockTree, Key, Node
from engine.scheduler.blocks import BlockAllocator


def keys(text: str) -> list[Key]:
    """One block a letter."""
    return [(ord(letter),) * GRID for letter in text]


class Forest:
    """A tree over an allocator; sequences are written as letters."""

    def __init__(self, blocks: int = 32) -> None:
        self.blocks = BlockAllocator(blocks)
        self.gone: list[Node] = []
        self.tree = BlockTree(self.blocks, self.gone.append)

    def put(self, text: str, salt: str | None = None, *, hold: bool = False) -> Sequence[int]:
        """A sequence computes these blocks alone, publishes them and ends unless it holds them."""
        taken = self.blocks.allocate(len(text))
        assert taken is not None
        self.tree.insert(salt, keys(text), taken)
        if not hold:
            self.blocks.free(taken)
        return taken

    def has(self, text: str, salt: str | None = None) -> int:
        return len(self.tree.match(salt, keys(text)))


def test_the_longest_common_path_matches() -> None:
    forest = Forest()
    forest.put("abc")
    forest.put("abde")
    assert len(forest.tree) == 5
    assert [forest.has(text) for text in ("abc", "abdex", "abx", "x", "bc", "")] == [
        3,
        4,
        2,
        0,
        0,
        0,
    ]
    path = forest.tree.match(None, keys("abd"))
    assert [node.end for node in path] == [GRID, 2 * GRID, 3 * GRID]


def test_tenants_share_nothing() -> None:
    forest = Forest()
    forest.put("ab", "one")
    assert (forest.has("ab"), forest.has("ab", "two"), forest.has("ab", "one")) == (0, 0, 2)
    forest.put("ab", "two")
    assert len(forest.tree) == 4
    first, second = (forest.tree.match(salt, keys("ab")) for salt in ("one", "two"))
    assert {node.block for node in first}.isdisjoint(node.block for node in second)


def test_blocks_that_are_there_are_not_taken_over() -> None:
    forest = Forest()
    first = forest.put("ab")
    taken = forest.blocks.allocate(3)
    assert taken is not None
    path, fresh = forest.tree.insert(None, keys("abc"), taken)
    assert [node.block for node in path] == [*first, taken[2]]
    assert fresh == path[2:]
    forest.blocks.free(taken)
    assert (forest.blocks.used, forest.blocks.idle, len(forest.tree)) == (0, 3, 3)


def test_the_least_recently_used_end_goes_first() -> None:
    forest = Forest()
    forest.put("abc")
    forest.put("abd")
    forest.put("x")
    forest.tree.touch(forest.tree.match(None, keys("abc")))
    assert forest.tree.reclaim(1) == 1
    assert (forest.has("abc"), forest.has("abd"), forest.has("x")) == (3, 2, 1)
    assert forest.tree.reclaim(2) == 2
    assert (forest.has("abc"), forest.has("x")) == (2, 0)
    assert forest.tree.reclaim(9) == 2
    assert (len(forest.tree), forest.blocks.free_count) == (0, 32)
    assert len(forest.gone) == 5


def test_the_oldest_block_is_the_end_of_a_path() -> None:
    """So that giving one up looks at no other."""
    forest = Forest()
    for text in ("abcd", "abx", "y", "abcz"):
        forest.put(text)
        forest.tree.touch(forest.tree.match(None, keys("abc")))
        assert not next(iter(forest.tree._order)).children


def test_what_a_sequence_holds_stays() -> None:
    forest = Forest()
    held = forest.put("abc", hold=True)
    forest.put("abd")
    assert forest.tree.reclaim(9) == 1
    assert (forest.has("abc"), forest.has("abd")) == (3, 2)
    forest.blocks.free(held)
    assert forest.tree.reclaim(1) == 1
    assert forest.has("abc") == 2, "the end of a path goes before its beginning"


def test_every_idle_block_can_be_reclaimed() -> None:
    """Nobody holds a prefix, but a sequence what follows it: that leaves the tree with it."""
    forest = Forest(4)
    forest.put("ab")
    taken = forest.blocks.allocate(2)
    assert taken is not None
    forest.tree.insert(None, keys("ac"), taken)
    forest.blocks.free(taken[:1])
    assert (forest.blocks.used, forest.blocks.idle, forest.blocks.available) == (1, 2, 3)
    assert forest.tree.reclaim(3) == 2
    assert (forest.blocks.free_count, forest.blocks.used, len(forest.tree)) == (3, 1, 0)
    forest.blocks.free(taken[1:])
    assert forest.blocks.free_count == 4


def test_a_removed_node_takes_along_what_follows_it() -> None:
    forest = Forest()
    forest.put("abc")
    forest.put("abd")
    node = forest.tree.match(None, keys("ab"))[1]
    assert forest.tree.remove(node) == 3
    assert (forest.has("abc"), len(forest.tree)) == (1, 1)
    with pytest.raises(InvariantError, match="not in the tree"):
        forest.tree.remove(node)


def test_a_tenant_without_blocks_leaves_nothing_behind() -> None:
    forest = Forest()
    for number in range(10):
        forest.put("a", f"tenant {number}")
    forest.tree.reclaim(10)
    assert forest.tree._roots == {}
