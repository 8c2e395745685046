"""What can be reused, which checkpoint goes first, and random traffic against a plain model."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.config import GRID
from engine.errors import InvariantError
from engine.prefix_cache import Key, Match, Node, PrefixCache
from engine.prefix_cache.cache import Miss
from engine.prefix_cache.checkpoints import Checkpoints
from engine.scheduler.blocks import BlockAllocator
from tests.engine.prefix_cache.test_tree import keys


class Shelf:
    """A cache over an allocator."""

    def __init__(self, blocks: int = 32, places: int = 4) -> None:
        self.blocks = BlockAllocator(blocks)
        self.cache = PrefixCache(self.blocks, places)

    def put(self, text: str, *checkpoints: int, salt: str | None = None) -> list[Node]:
        """A sequence with checkpoints after so many blocks has come and gone."""
        taken = self.blocks.allocate(len(text)) or ()
        path, _ = self.cache.publish(salt, keys(text), taken)
        for depth in checkpoints:
            place = self.cache.checkpoints.claim()
            assert place is not None
            self.cache.checkpoints.attach(path[depth - 1], place)
        self.blocks.free(taken)
        return path

    def match(self, text: str, salt: str | None = None) -> Match:
        return self.cache.match(salt, keys(text))


def test_a_hit_reaches_to_the_deepest_checkpoint_within_the_blocks() -> None:
    shelf = Shelf()
    shelf.put("abcd", 2)
    shelf.put("abcdefg", 6)
    assert [shelf.match(text).tokens // GRID for text in ("a", "ab", "abcde", "abcdefgh")] == [
        0,
        2,
        2,
        6,
    ]
    assert [shelf.match(text).miss for text in ("", "x", "a", "ab")] == [
        Miss.SHORT,
        Miss.COLD,
        Miss.NO_CHECKPOINT,
        None,
    ]
    assert shelf.match("ab", "other").miss is Miss.COLD


def test_where_prompts_part_a_checkpoint_is_wanted() -> None:
    shelf = Shelf()
    shelf.put("abcd", 4)
    assert shelf.match("abxy").branch == 2 * GRID
    assert shelf.match("ab").branch == 0, "it ends where the other goes on"
    assert shelf.match("abcdx").branch == 0, "it goes on where the other ends"
    assert shelf.match("xy").branch == 0
    shelf.put("abxy", 2)
    assert shelf.match("abzz").branch == 0, "there is one"
    assert shelf.match("abzz").tokens == 2 * GRID


def test_a_checkpoint_goes_with_its_block() -> None:
    shelf = Shelf(blocks=3, places=2)
    shelf.put("abc", 1, 3)
    assert shelf.cache.reclaim(1) == 1
    assert (shelf.cache.checkpoints.used, shelf.cache.stats().checkpoints_evicted) == (1, 1)
    assert shelf.match("abc").tokens == GRID
    shelf.cache.check()


def test_checkpoints_and_blocks_have_orders_of_their_own() -> None:
    shelf = Shelf(places=2)
    shelf.put("ab", 2)
    shelf.put("cd", 2)
    shelf.cache.use(shelf.match("ab"))
    shelf.put("ef", 2)
    assert (shelf.match("cd").tokens, shelf.match("ab").tokens) == (0, 2 * GRID)
    assert shelf.match("cd").miss is Miss.NO_CHECKPOINT
    assert len(shelf.cache) == 6
    stats = shelf.cache.stats()
    assert (stats.checkpoints, stats.checkpoints_saved, stats.checkpoints_evicted) == (2, 3, 1)


def test_lookups_are_counted_once_each() -> None:
    shelf = Shelf()
    shelf.put("abc", 2)
    for text, length in (("abc", 200), ("x", 70), ("", 30), ("ab", 100)):
        shelf.cache.count(shelf.match(text), length)
    stats = shelf.cache.stats()
    assert (stats.hits, dict(stats.misses)) == (2, {"short": 1, "cold": 1, "no_checkpoint": 0})
    assert (stats.hit_tokens, stats.queried_tokens) == (128 + 100, 400)


def test_what_may_be_wrong_is_withdrawn_with_all_behind_it() -> None:
    shelf = Shelf()
    path = shelf.put("abc", 1, 3)
    shelf.put("abd", 3)
    shelf.cache.withdraw([path[1], path[2]])
    assert (len(shelf.cache), shelf.cache.checkpoints.used) == (1, 1)
    assert shelf.match("abd").tokens == GRID
    shelf.cache.check()


class TestPlaces:
    """Rolling checkpoints and the places they may take."""

    def node(self) -> Node:
        root = Node(None, (), -1)
        return Node(root, (1,), 0)

    def test_half_of_the_places_roll_and_they_do_not_push_each_other_out(self) -> None:
        places = Checkpoints(4)
        rolling = [self.node(), self.node()]
        for node in rolling:
            place = places.claim(rolling=True)
            assert place is not None
            places.attach(node, place, rolling=True)
        assert places.claim(rolling=True) is None
        for _ in range(5):
            place = places.claim()
            assert place is not None
            places.attach(self.node(), place)
        assert all(node.place >= 0 for node in rolling)
        assert places.evicted == 3
        places.settle(rolling[0])
        assert places.claim(rolling=True) is not None

    def test_one_place_never_rolls_and_none_holds_nothing(self) -> None:
        assert Checkpoints(1).claim(rolling=True) is None
        assert Checkpoints(0).claim() is None

    def test_two_checkpoints_at_one_node_are_a_mistake(self) -> None:
        places, node = Checkpoints(2), self.node()
        places.attach(node, places.claim() or 0)
        with pytest.raises(InvariantError, match="already"):
            places.attach(node, 1)

    def test_a_lost_place_is_found(self) -> None:
        places = Checkpoints(2)
        places.claim()
        with pytest.raises(InvariantError, match="of 2 checkpoint places"):
            places.check()


class _Run:
    """A sequence of the plain model: what it holds."""

    def __init__(self, salt: str | None, text: str, table: list[int], shared: int) -> None:
        self.salt, self.text, self.table, self.shared = salt, text, table, shared
        self.made: list[Node] = []


class Traffic(RuleBasedStateMachine):
    """Sequences come, compute, publish and go; the content of blocks and places is written down."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(12)
        self.cache = PrefixCache(self.blocks, 3)
        self.content: dict[int, tuple[str | None, str]] = {}
        self.states: dict[int, tuple[str | None, str]] = {}
        self.open: list[_Run] = []

    @rule(
        target=runs,
        salt=st.sampled_from([None, "t"]),
        text=st.text("ab", min_size=1, max_size=6),
    )
    def start(self, salt: str | None, text: str) -> _Run | None:
        match = self.cache.match(salt, keys(text))
        need = len(text) - len(match.path)
        idle = sum(self.blocks.holders(node.block) == 1 for node in match.path)
        if need + idle > self.blocks.available:
            return None
        for depth, node in enumerate(match.path, 1):
            assert self.content[node.block] == (salt, text[:depth])
        if match.path:
            assert self.states[match.path[-1].place] == (salt, text[: len(match.path)])
            self.cache.use(match)
        shared = [node.block for node in match.path]
        self.blocks.share(shared)
        if need > self.blocks.free_count:
            self.cache.reclaim(need - self.blocks.free_count)
        fresh = self.blocks.allocate(need)
        assert fresh is not None, "what is idle can be had"
        for depth, block in enumerate(fresh, len(shared) + 1):
            self.content[block] = (salt, text[:depth])
        run = _Run(salt, text, [*shared, *fresh], len(shared))
        self.open.append(run)
        return run

    @rule(run=runs, depth=st.integers(1, 6), rolling=st.booleans())
    def publish(self, run: _Run | None, depth: int, rolling: bool) -> None:
        if run is None or run not in self.open:
            return
        depth = min(depth, len(run.text))
        path, fresh = self.cache.publish(run.salt, keys(run.text[:depth]), run.table)
        run.made += fresh
        node = path[-1]
        if node.place >= 0:
            return
        place = self.cache.checkpoints.claim(rolling=rolling)
        if place is not None:
            self.cache.checkpoints.attach(node, place, rolling=rolling)
            self.states[place] = (run.salt, run.text[:depth])
            if depth % 2:
                self.cache.checkpoints.settle(node)

    @rule(run=consumes(runs), failed=st.booleans())
    def end(self, run: _Run | None, failed: bool) -> None:
        if run is None or run not in self.open:
            return
        self.open.remove(run)
        if failed:
            self.cache.withdraw(run.made)
        self.cache.touch(run.salt, keys(run.text))
        self.blocks.free(run.table)

    @rule(count=st.integers(1, 12))
    def reclaim(self, count: int) -> None:
        idle = self.blocks.idle
        assert self.cache.reclaim(count) >= min(count, idle)

    @invariant()
    def accounts_agree(self) -> None:
        self.cache.check()
        holders = Counter(block for run in self.open for block in run.table)
        holders.update(self.cache.blocks())
        for block in range(self.blocks.total):
            assert self.blocks.holders(block) == holders[block]
        used = {block for run in self.open for block in run.table}
        assert self.blocks.used == len(used)
        assert self.blocks.idle == len(set(self.cache.blocks()) - used)

    @invariant()
    def every_path_holds_its_own_tokens(self) -> None:
        for salt in (None, "t"):
            for text in ("aaaaaa", "ababab", "bbbbbb", "aabbaa"):
                for depth, node in enumerate(self.cache._tree.match(salt, keys(text)), 1):
                    assert self.content[node.block] == (salt, text[:depth])

    def teardown(self) -> None:
        for run in list(self.open):
            self.end(run, False)  # type: ignore[arg-type]
        self.cache.reclaim(self.blocks.total)
        assert self.blocks.free_count == self.blocks.total
        assert self.cache.checkpoints.used == len(self.cache) == 0


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_key_is_a_block_of_tokens() -> None:
    key: Key = keys("a")[0]
    assert len(key) == GRID
