"""Which place of the snapshot pool holds the state at which node, and which is given up next.

Knows places and nodes; copies nothing.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.errors import InvariantError
from engine.prefix_cache.tree import NO_PLACE, Node


class Checkpoints:
    """Places 0..places-1 and the checkpoints in them, least recently used first.

    A rolling checkpoint belongs to a turn that still runs and moves along with it. At most half of
    the places are rolling, so that many turns at once cannot push out what prompts share.

    Attributes:
        saved, evicted: checkpoints that were made, and that were given up for another one or for
            their blocks.
    """

    def __init__(self, places: int) -> None:
        self._total = places
        self._free = list(range(places - 1, -1, -1))
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._rolling: set[Node] = set()
        self.saved = 0
        self.evicted = 0

    @property
    def total(self) -> int:
        """Places in all."""
        return self._total

    @property
    def used(self) -> int:
        """Places that hold a checkpoint."""
        return len(self._order)

    @property
    def may_roll(self) -> bool:
        """Whether one more rolling checkpoint is allowed."""
        return len(self._rolling) < self._total // 2

    def rolls(self, node: Node) -> bool:
        """Whether the checkpoint of a node belongs to a turn that still runs."""
        return node in self._rolling

    def claim(self, *, rolling: bool = False) -> int | None:
        """A place to write to, taken from the least recently used checkpoint if need be.

        None when there is none to take; a rolling one is also refused when half of them roll.
        """
        if rolling and not self.may_roll:
            return None
        if not self._free and not self.drop_oldest():
            return None
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """A claimed place is not needed after all."""
        self._free.append(place)

    def drop_oldest(self) -> bool:
        """Give up the least recently used checkpoint that does not roll; False without one."""
        victim = next((node for node in self._order if node not in self._rolling), None)
        if victim is None:
            return False
        self.release(victim)
        self.evicted += 1
        return True

    def attach(self, node: Node, place: int, *, rolling: bool = False) -> None:
        """The state at `node` lies at `place` now.

        Raises:
            InvariantError: the node has a checkpoint already.
        """
        if node.place != NO_PLACE:
            raise InvariantError(f"a checkpoint lies at place {node.place} already")
        node.place = place
        self._order[node] = None
        if rolling:
            self._rolling.add(node)
        self.saved += 1

    def release(self, node: Node) -> None:
        """Forget the checkpoint of a node, if it has one."""
        if node.place == NO_PLACE:
            return
        self._free.append(node.place)
        node.place = NO_PLACE
        del self._order[node]
        self._rolling.discard(node)

    def touch(self, node: Node) -> None:
        """The node's checkpoint was used just now."""
        self._order.move_to_end(node)

    def settle(self, node: Node) -> None:
        """The turn of a rolling checkpoint is over: it is one as any other from now on."""
        self._rolling.discard(node)

    def check(self) -> None:
        """Compare places and nodes.

        Raises:
            InvariantError: a place is lost or used twice, or a node is not in the tree.
        """
        places = sorted([*self._free, *(node.place for node in self._order)])
        if places != list(range(self._total)):
            raise InvariantError(f"of {self._total} checkpoint places there are {places}")
        if any(node.parent is None for node in self._order):
            raise InvariantError("a checkpoint belongs to a node that is not in the tree")
        if not self._rolling <= self._order.keys():
            raise InvariantError("a rolling checkpoint has no place")
