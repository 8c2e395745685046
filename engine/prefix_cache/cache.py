"""The prefix cache as one account: what a prompt can reuse, what is kept, and what goes first.

A prefix can be reused up to a checkpoint of the recurrent state, as far as the KV blocks before it
are there. Knows tokens, block ids and places; no tensors, and nothing of when a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.config import GRID
from engine.errors import InvariantError
from engine.prefix_cache.checkpoints import Checkpoints
from engine.prefix_cache.tree import NO_PLACE, BlockKeeper, BlockTree, Key, Node
from engine.request import PrefixCacheStats


class Miss(StrEnum):
    """Why nothing of a prompt could be reused.

    SHORT: it has no whole block before its last token. COLD: its first block is not cached.
    NO_CHECKPOINT: blocks are, and no state within them.
    """

    SHORT = "short"
    COLD = "cold"
    NO_CHECKPOINT = "no_checkpoint"


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is cached.

    Attributes:
        path: its blocks up to the deepest checkpoint, which is that of the last node; empty
            where nothing can be reused.
        branch: tokens after which other prompts went on differently and no state is kept, 0 for
            none; beyond the path.
        miss: why the path is empty, None where it is not.
    """

    path: tuple[Node, ...]
    branch: int
    miss: Miss | None

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed."""
        return len(self.path) * GRID


class PrefixCache:
    """Tree and checkpoints, each with its own order of use.

    Args:
        blocks: reference counts of the KV blocks.
        places: of the snapshot pool.
    """

    def __init__(self, blocks: BlockKeeper, places: int) -> None:
        self.checkpoints = Checkpoints(places)
        self._tree = BlockTree(blocks, self.checkpoints.release)
        self._blocks = blocks
        self._hits = 0
        self._hit_tokens = 0
        self._queried_tokens = 0
        self._misses = dict.fromkeys(Miss, 0)
        self._reclaimed = 0
        self._stats = PrefixCacheStats(checkpoint_places=places)
        self._stats_of: tuple[int, ...] = ()

    def __len__(self) -> int:
        """KV blocks that the cache holds."""
        return len(self._tree)

    def match(self, salt: str | None, keys: Sequence[Key]) -> Match:
        """What of the blocks `keys` can be reused; changes nothing.

        Args:
            salt: the tenant; tenants share nothing.
            keys: tokens by block, whole blocks before the last token only: that one is computed.
        """
        if not keys:
            return Match((), 0, Miss.SHORT)
        path = self._tree.match(salt, keys)
        if not path:
            return Match((), 0, Miss.COLD)
        depth = len(path)
        while depth and path[depth - 1].place == NO_PLACE:
            depth -= 1
        diverges = depth < len(path) < len(keys) and bool(path[-1].children)
        branch = path[-1].end if diverges else 0
        return Match(tuple(path[:depth]), branch, None if depth else Miss.NO_CHECKPOINT)

    def use(self, match: Match) -> None:
        """The path of a match is being reused."""
        self._tree.touch(match.path)
        self.checkpoints.touch(match.path[-1])

    def count(self, match: Match, prompt_tokens: int) -> None:
        """Count the lookup of a prompt; hits never exceed its tokens."""
        self._queried_tokens += prompt_tokens
        if match.miss is not None:
            self._misses[match.miss] += 1
        else:
            self._hits += 1
            self._hit_tokens += min(match.tokens, prompt_tokens)

    def publish(
        self, salt: str | None, keys: Sequence[Key], blocks: Sequence[int]
    ) -> tuple[list[Node], list[Node]]:
        """Keep the blocks of committed tokens; see BlockTree.insert."""
        return self._tree.insert(salt, keys, blocks)

    def touch(self, salt: str | None, keys: Sequence[Key]) -> list[Node]:
        """A sequence lets go of these blocks: they were used until now. Returns those cached."""
        path = self._tree.match(salt, keys)
        self._tree.touch(path)
        return path

    def withdraw(self, nodes: Sequence[Node]) -> None:
        """Forget nodes, and all behind them, whose content may be wrong."""
        for node in nodes:
            if node.parent is not None:
                self._tree.remove(node)

    def reclaim(self, count: int) -> int:
        """Free up to `count` blocks that only the cache holds; returns how many it were."""
        before = self.checkpoints.used
        freed = self._tree.reclaim(count)
        self.checkpoints.evicted += before - self.checkpoints.used
        self._reclaimed += freed
        return freed

    def blocks(self) -> list[int]:
        """Every block that the cache holds."""
        return list(self._tree.blocks())

    def check(self) -> None:
        """Check the accounts.

        Raises:
            InvariantError: a block or a place is lost or counted twice.
        """
        blocks = self.blocks()
        if len(set(blocks)) != len(blocks):
            raise InvariantError("the prefix cache holds a block twice")
        self.checkpoints.check()

    def stats(self) -> PrefixCacheStats:
        """Gauges and counters as of now; the same object while nothing changes."""
        places = self.checkpoints
        counts = (self._queried_tokens, self._hits, len(self._tree), self._reclaimed)
        now = (*counts, places.used, places.saved, places.evicted)
        if now != self._stats_of:
            self._stats_of = now
            self._stats = PrefixCacheStats(
                hits=self._hits,
                misses=tuple((reason.value, count) for reason, count in self._misses.items()),
                hit_tokens=self._hit_tokens,
                queried_tokens=self._queried_tokens,
                checkpoint_places=places.total,
                checkpoints=places.used,
                checkpoints_saved=places.saved,
                checkpoints_evicted=places.evicted,
                blocks=len(self._tree),
                blocks_evicted=self._reclaimed,
            )
        return self._stats
