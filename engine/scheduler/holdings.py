"""What running sequences hold: state slots and KV blocks, together. Knows no order and no queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing

from engine.errors import InvariantError
from engine.prefix_cache import PrefixCache
from engine.scheduler.blocks import BlockAllocator
from engine.scheduler.sequence import Sequence
from engine.scheduler.slots import SlotAllocator

SlotMover = Callable[[int, int], None]


class Holdings:
    """Slots and blocks of the running sequences, taken and given back as a pair.

    Args:
        slots: state slots in all.
        blocks: KV blocks in all.
        move_slot: copies a slot's tensors, called as move_slot(src, dst).

    Attributes:
        cache: holds blocks too, and gives up what nobody else holds when blocks run out.
    """

    __slots__ = ("_at", "_move_slot", "blocks", "cache", "slots")

    def __init__(self, slots: int, blocks: int, move_slot: SlotMover) -> None:
        self.slots = SlotAllocator(slots)
        self.blocks = BlockAllocator(blocks)
        self._at: list[Sequence | None] = [None] * slots
        self._move_slot = move_slot
        self.cache: PrefixCache | None = None

    def running(self) -> Iterator[Sequence]:
        """Every sequence that holds a slot, by rising slot."""
        return (sequence for sequence in self._at if sequence is not None)

    def take(self, sequence: Sequence, blocks: int, shared: Listing[int] = ()) -> int:
        """Give a sequence the lowest free slot and `blocks` blocks; returns the slot.

        The first of the blocks are `shared`, which the cache holds.

        Raises:
            InvariantError: there are fewer; the caller checks first.
        """
        self.blocks.share(shared)
        taken = self._allocate(blocks - len(shared))
        if taken is None:
            raise InvariantError(f"{blocks} KV blocks wanted and {self.blocks.available} to be had")
        slot = self.slots.claim(sequence.request_id)
        sequence.slot = slot
        sequence.add_blocks((*shared, *taken))
        self._at[slot] = sequence
        return slot

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence the blocks it lacks for `tokens` tokens; False when there are too few."""
        missing = sequence.blocks_missing(tokens)
        if missing == 0:
            return True
        taken = self._allocate(missing)
        if taken is None:
            return False
        sequence.add_blocks(taken)
        return True

    def _allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks, some of them the cache's if need be; None when there are too few."""
        lacking = count - self.blocks.free_count
        if lacking > 0 and self.cache is not None and count <= self.blocks.available:
            self.cache.reclaim(lacking)
        return self.blocks.allocate(count)

    def shrink(self, sequence: Sequence, tokens: int) -> None:
        """Free the blocks that a sequence holds beyond `tokens` tokens."""
        self.blocks.free(sequence.drop_blocks(tokens))

    def give_back(self, sequence: Sequence) -> None:
        """Free everything that a sequence holds."""
        slot = sequence.slot
        if slot is None:
            raise InvariantError(f"request {sequence.request_id} holds no slot")
        self.slots.release(slot, sequence.request_id)
        self.blocks.free(sequence.block_table)
        self._at[slot] = None
        sequence.drop_holdings()

    def compact(self) -> None:
        """Move the highest running sequence onto the lowest free slot until none is above one.

        Call it only after every finished sequence's slot has been released: done one by one, a
        survivor could land on a slot that a finished sequence still believes to own.
        """
        while True:
            src, dst = self.slots.highest_used(), self.slots.lowest_free()
            if src is None or dst is None or src < dst:
                return
            sequence = self._at[src]
            if sequence is None:
                raise InvariantError(f"slot {src} is owned and no running sequence is there")
            self._move_slot(src, dst)
            self.slots.move(src, dst, sequence.request_id)
            self._at[src], self._at[dst] = None, sequence
            sequence.slot = dst

    def check(self) -> None:
        """Compare slots and blocks with what running sequences and the cache say that they hold.

        Raises:
            InvariantError: something is lost, or held twice.
        """
        holders = [0] * self.blocks.total
        running = 0
        if self.cache is not None:
            self.cache.check()
            for block in self.cache.blocks():
                holders[block] += 1
        for slot, sequence in enumerate(self._at):
            owner = self.slots.owner_of(slot)
            if owner != (sequence.request_id if sequence else None):
                raise InvariantError(f"slot {slot} is owned by {owner}, {sequence} runs there")
            if sequence is None:
                continue
            running += 1
            if sequence.slot != slot:
                raise InvariantError(f"request {owner} in slot {slot} says {sequence.slot}")
            for block in sequence.block_table:
                holders[block] += 1
        if running != self.slots.used or running + self.slots.free != self.slots.total:
            raise InvariantError(f"{running} sequences run, {self.slots.used} slots are used")
        for block, count in enumerate(holders):
            if self.blocks.holders(block) != count:
                raise InvariantError(
                    f"KV block {block} counts {self.blocks.holders(block)} holders, has {count}"
                )
        held = self.blocks.used + self.blocks.idle
        if sum(count > 0 for count in holders) != held:
            raise InvariantError(f"the free list and {held} held KV blocks disagree")
