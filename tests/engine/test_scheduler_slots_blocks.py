"""Slot and block accounts: lowest slot first, nothing owned twice, nothing lost."""

import pytest

from engine.errors import InvariantError
from engine.scheduler.blocks import BlockAllocator
from engine.scheduler.slots import SlotAllocator


def test_claims_take_the_lowest_free_slot() -> None:
    slots = SlotAllocator(4)
    assert [slots.claim(owner) for owner in (10, 11, 12)] == [0, 1, 2]
    slots.release(1, 11)
    slots.release(0, 10)
    assert slots.lowest_free() == 0
    assert slots.claim(13) == 0
    assert slots.claim(14) == 1
    assert slots.claim(15) == 3
    assert (slots.used, slots.free, slots.total) == (4, 0, 4)


def test_a_slot_has_one_owner_and_an_owner_one_slot() -> None:
    slots = SlotAllocator(2)
    slots.claim(1)
    with pytest.raises(InvariantError, match="request 1 already owns slot 0"):
        slots.claim(1)
    slots.claim(2)
    with pytest.raises(InvariantError, match="all 2 are taken"):
        slots.claim(3)
    with pytest.raises(InvariantError, match="slot 0 belongs to request 1, not to 2"):
        slots.release(0, 2)
    with pytest.raises(InvariantError, match="slot 1 belongs to request 2"):
        slots.move(0, 1, 1)


def test_a_released_slot_cannot_be_released_again() -> None:
    slots = SlotAllocator(1)
    slots.claim(1)
    slots.release(0, 1)
    with pytest.raises(InvariantError, match="belongs to request None"):
        slots.release(0, 1)


def test_move_exchanges_the_slot_for_a_free_one() -> None:
    slots = SlotAllocator(3)
    for owner in (1, 2, 3):
        slots.claim(owner)
    slots.release(0, 1)
    assert slots.highest_used() == 2
    slots.move(2, 0, 3)
    assert [slots.owner_of(slot) for slot in range(3)] == [3, 2, None]
    assert (slots.highest_used(), slots.lowest_free()) == (1, 2)
    slots.release(0, 3)
    assert slots.free == 2


def test_allocation_is_all_or_nothing() -> None:
    blocks = BlockAllocator(4)
    first = blocks.allocate(3)
    assert first is not None
    assert len(set(first)) == 3
    assert blocks.allocate(2) is None
    assert blocks.free_count == 1
    assert blocks.allocate(0) == ()
    blocks.free(first)
    assert (blocks.free_count, blocks.used) == (4, 0)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    blocks = BlockAllocator(2)
    taken = blocks.allocate(2)
    assert taken is not None
    blocks.share(taken[:1])
    blocks.free(taken)
    assert (blocks.holders(taken[0]), blocks.used, blocks.free_count) == (1, 1, 1)
    blocks.free(taken[:1])
    assert blocks.free_count == 2
    with pytest.raises(InvariantError, match="free already"):
        blocks.free(taken[:1])
    with pytest.raises(InvariantError, match="cannot be shared"):
        blocks.share(taken[:1])
