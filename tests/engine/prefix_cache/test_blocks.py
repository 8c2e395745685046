"""Blocks that a cache holds beside the sequences: idle, available, never free twice."""

import pytest

from engine.errors import InvariantError
from engine.scheduler.blocks import BlockAllocator


def test_a_cached_block_outlives_its_sequence_and_comes_back() -> None:
    blocks = BlockAllocator(3)
    (first, second) = blocks.allocate(2) or ()
    blocks.keep(first)
    assert (blocks.used, blocks.idle, blocks.available) == (2, 0, 1)
    blocks.free((first, second))
    assert (blocks.used, blocks.idle, blocks.available, blocks.free_count) == (0, 1, 3, 2)
    blocks.share((first,))
    assert (blocks.used, blocks.idle, blocks.available) == (1, 0, 2)
    assert not blocks.drop(first)
    blocks.free((first,))
    assert (blocks.used, blocks.idle, blocks.free_count) == (0, 0, 3)


def test_an_idle_block_that_is_dropped_is_free() -> None:
    blocks = BlockAllocator(1)
    (block,) = blocks.allocate(1) or ()
    blocks.keep(block)
    blocks.free((block,))
    assert blocks.allocate(1) is None
    assert blocks.drop(block)
    assert blocks.allocate(1) == (block,)


def test_what_nobody_holds_is_refused() -> None:
    blocks = BlockAllocator(2)
    with pytest.raises(InvariantError, match="free and cannot be cached"):
        blocks.keep(0)
    (block,) = blocks.allocate(1) or ()
    blocks.keep(block)
    with pytest.raises(InvariantError, match="cached already"):
        blocks.keep(block)
    blocks.free((block,))
    with pytest.raises(InvariantError, match="free already"):
        blocks.free((block,))
    with pytest.raises(InvariantError, match="is not cached"):
        blocks.drop(1 - block)
