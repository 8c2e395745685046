"""Where sequences meet the prefix cache: what one reuses when it starts, and what it leaves behind.

Knows sequences, blocks and checkpoints; copies no state itself and decides nothing about steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass

from engine.config import GRID
from engine.prefix_cache import Key, Match, Node, PrefixCache
from engine.prefix_cache.tree import NO_PLACE
from engine.runner import Restore, RowPhase, Save, SavedState
from engine.scheduler.plan import StepPlan
from engine.scheduler.sequence import Phase, Sequence

# No checkpoint is ever due.
NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class StatePort:
    """What the cache asks of the model, and what it may keep of it.

    Attributes:
        places: of the snapshot pool.
        decoded: states and KV that decode steps left may be reused too, not only a prompt's.
        cuts: outputs of retractable requests may be cut and go on differently, in the same blocks;
            so what their decode steps leave is not kept.
        save: copies a state to its place; called between a step's forward and its retirement.
        note_hidden: a forward left a state at (place), and (row) of its hidden states goes with it.
        drafted: (first, end) rows of a slot's sequence that the drafter's layer holds; None
            without speculation.
    """

    places: int
    decoded: bool
    save: Callable[[SavedState], None]
    note_hidden: Callable[[int, int], None]
    drafted: Callable[[int], tuple[int, int]] | None = None
    cuts: bool = False


class PrefixReuse:
    """Looks up, takes and publishes prefixes for the scheduler.

    A prompt leaves a checkpoint at the last grid point before its last token, so that the same
    prompt can use it, and one where it parts from an earlier prompt. Only the second of them is of
    use to others, but which one that is shows when the third comes.
    """

    def __init__(self, cache: PrefixCache, port: StatePort) -> None:
        self.cache = cache
        self._port = port

    def lookup(self, sequence: Sequence) -> Match:
        """What a waiting sequence could reuse now; changes nothing but its notes."""
        known = len(sequence.prompt) + len(sequence.generated)
        return self.cache.match(sequence.salt, self._keys(sequence, known - 1))

    def take(self, sequence: Sequence, match: Match) -> None:
        """A sequence starts and plans its checkpoints; its phase follows from what it reuses.

        It holds the blocks of `match` already.
        """
        length, generated = len(sequence.prompt), len(sequence.generated)
        hit = match.tokens
        if hit:
            self.cache.use(match)
        if sequence.preemptions == 0:
            self.cache.count(match, length)
            sequence.cached_tokens = min(hit, length)
        sequence.computed = hit
        last = (length - 1) // GRID * GRID
        wanted = sorted({match.branch, last} - {0})
        sequence.targets = [target for target in wanted if hit < target <= last]
        sequence.checkpoint_at = self._first_due(sequence)
        sequence.phase = Phase.PREFILL
        if hit >= length and generated:
            sequence.phase = Phase.REPLAY if hit < length + generated - 1 else Phase.DECODE

    def restore(self, sequence: Sequence, match: Match) -> Restore | None:
        """What to copy into the slot of a sequence that starts; None without a hit."""
        if not match.path or sequence.slot is None:
            return None
        drafted = match.tokens
        for node in reversed(match.path):
            if not node.drafted:
                break
            drafted = node.end - GRID
        return Restore(
            slot=sequence.slot,
            place=match.path[-1].place,
            position=match.tokens,
            first_drafted=drafted,
            next_token=sequence.token_at(match.tokens),
        )

    def set_aside(self, sequence: Sequence, end: int) -> tuple[Save, ...]:
        """Take places for the checkpoints that a prompt's next rows, up to `end`, pass."""
        while sequence.targets and sequence.targets[0] <= end:
            target = sequence.targets.pop(0)
            place = self.cache.checkpoints.claim()
            if place is not None:
                sequence.reserved.append((target, place))
        start = sequence.computed
        return tuple(Save(target - start, place) for target, place in sequence.reserved)

    def due(self, sequence: Sequence, plan: StepPlan, index: int, emitted: int) -> None:
        """A sequence has reached its `checkpoint_at` in the step that is being committed.

        Args:
            sequence: with the step's tokens taken over.
            plan: the step, whose states still lie in the slots that it names.
            index: of the sequence in it.
            emitted: rows of a verify that led to tokens, before any cut.
        """
        segment = plan.segments[index]
        first_row = sum(len(each.token_ids) for each in plan.segments[:index])
        if segment.phase is RowPhase.PREFILL:
            self._attach(sequence, first_row - segment.start)
            sequence.checkpoint_at = self._first_due(sequence)
            return
        position = sequence.checkpoint_at
        wanted = position - segment.start
        saved = SavedState(
            slot=segment.slot,
            place=NO_PLACE,
            rows=len(segment.token_ids),
            emitted=emitted if segment.phase is RowPhase.DECODE else len(segment.token_ids),
            wanted=wanted,
            hidden_row=first_row + wanted - 1,
        )
        self._roll(sequence, position, saved)
        sequence.checkpoint_at = position + GRID

    def leave(self, sequence: Sequence, *, failed: bool) -> None:
        """A sequence is about to give everything back; what it published stays unless it failed."""
        if failed:
            self.cache.withdraw(sequence.published)
        else:
            path = self.cache.touch(sequence.salt, self._keys(sequence, sequence.computed))
            self._note_drafted(sequence, path)
        for _, place in sequence.reserved:
            self.cache.checkpoints.give_back(place)
        if sequence.rolling is not None:
            self.cache.checkpoints.settle(sequence.rolling)
        sequence.rolling = None
        sequence.published = []
        sequence.targets = []
        sequence.reserved = []
        sequence.checkpoint_at = NEVER

    def _first_due(self, sequence: Sequence) -> int:
        """Where the sequence needs attention next: a checkpoint of its prompt, or its end."""
        if sequence.targets:
            return sequence.targets[0]
        if sequence.computed < len(sequence.prompt):
            return len(sequence.prompt)
        return self._first_crossing(sequence)

    def _first_crossing(self, sequence: Sequence) -> int:
        """The first grid point behind all known tokens, where decode steps are of use."""
        if not self._port.decoded or (self._port.cuts and sequence.request.retractable):
            return NEVER
        consumed = len(sequence.prompt) + max(len(sequence.generated) - 1, 0)
        return (consumed // GRID + 1) * GRID

    def _attach(self, sequence: Sequence, first_row: int) -> None:
        """Leave the prompt's blocks behind, and its states where there is none yet.

        `first_row` is where position 0 would lie in the step's hidden states.
        """
        checkpoints = self.cache.checkpoints
        path = self._publish(sequence, sequence.computed)
        for position, place in sequence.reserved:
            node = path[position // GRID - 1]
            if node.place != NO_PLACE:
                checkpoints.touch(node)
                checkpoints.give_back(place)
                continue
            self._port.note_hidden(place, first_row + position - 1)
            checkpoints.attach(node, place)
        sequence.reserved = []

    def _roll(self, sequence: Sequence, position: int, saved: SavedState) -> None:
        """Move the checkpoint of a running turn along, if it has one or may have one."""
        checkpoints, former = self.cache.checkpoints, sequence.rolling
        if former is not None and checkpoints.rolls(former):
            checkpoints.release(former)
        sequence.rolling = None
        if not checkpoints.may_roll:
            return
        node = self._publish(sequence, position)[-1]
        if node.place != NO_PLACE:
            checkpoints.touch(node)
            return
        place = checkpoints.claim(rolling=True)
        if place is not None:
            self._port.save(saved._replace(place=place))
            checkpoints.attach(node, place, rolling=True)
            sequence.rolling = node

    def _publish(self, sequence: Sequence, tokens: int) -> list[Node]:
        """Keep the whole blocks of a sequence's first `tokens` tokens, all of them committed."""
        keys = self._keys(sequence, tokens)
        path, fresh = self.cache.publish(sequence.salt, keys, sequence.block_table)
        sequence.published += fresh
        self._note_drafted(sequence, path)
        return path

    def _note_drafted(self, sequence: Sequence, path: Listing[Node]) -> None:
        """Note which blocks of a path hold the drafter's rows, as the sequence left them."""
        if self._port.drafted is None or sequence.slot is None:
            return
        first, end = self._port.drafted(sequence.slot)
        for node, block in zip(path, sequence.block_table, strict=False):
            if node.block == block and first <= node.end - GRID and node.end <= end:
                node.drafted = True

    def _keys(self, sequence: Sequence, tokens: int) -> list[Key]:
        """The whole blocks among the first `tokens` known tokens."""
        keys = sequence.block_keys
        count = tokens // GRID
        while len(keys) < count:
            start = len(keys) * GRID
            keys.append(tuple(sequence.token_at(start + i) for i in range(GRID)))
        return keys[:count]
