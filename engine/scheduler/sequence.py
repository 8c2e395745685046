"""One request on its way through the engine, as a mutable record; the scheduler changes it.

Knows no tensors and takes no decisions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum

from engine.config import GRID
from engine.errors import InvariantError
from engine.prefix_cache.tree import Key, Node
from engine.request import FinishReason, GenerationRequest, RequestStats
from engine.sampling.state import SamplingState


class Phase(Enum):
    """What a sequence does next.

    WAITING holds neither slot nor blocks; PREFILL, REPLAY and DECODE hold both (see
    `engine.runner.RowPhase`); FINISHED is over, its slot and blocks are free or about to be.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    REPLAY = "replay"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """A request with what was generated so far and what it holds.

    Attributes:
        key: (priority, arrival); the smaller key is served first and preempted last.
        generated: the tokens emitted so far, kept across preemption.
        limit: tokens to generate at most, by max_tokens and by the context length.
        computed: tokens that the model consumed, i.e. the position of the next row.
        slot: the state slot, or None while waiting.
        block_table: KV blocks in order; a tuple so that a step can pass it on unchanged.
        capacity: tokens that the block table has room for.
        drafts: tokens proposed for the next step's rows after the last emitted token.
        held: it waits for something else than room (its grammar) and is not admitted yet.
        bypassed: how often a later request was admitted past this one.
        queued_at: when it last joined the queue, in seconds of the scheduler's clock.
        salt: whose cached prefixes it may reuse.
        cached_tokens: prompt tokens that it did not compute when it first started.
        checkpoint_at: `computed` at which it has something to leave in the prefix cache; replays
            stop there. Larger than every length when there is nothing.
        targets: checkpoints of the prompt still to be made, as `computed` to come.
        reserved: (computed, place) of those that the step in flight makes.
        rolling: where the checkpoint of the running turn is, if it has one.
        published: nodes of the prefix cache that hold blocks of its own.
        block_keys: its known tokens by block, as far as they were asked for.
    """

    __slots__ = (
        "accepted_per_position",
        "block_keys",
        "block_table",
        "bypassed",
        "cached_tokens",
        "capacity",
        "checkpoint_at",
        "computed",
        "drafted_per_position",
        "drafts",
        "finish_reason",
        "generated",
        "held",
        "key",
        "limit",
        "phase",
        "preemptions",
        "prompt",
        "published",
        "queue_seconds",
        "queued_at",
        "request",
        "request_id",
        "reserved",
        "retracted",
        "rollbacks",
        "rolling",
        "salt",
        "sampling",
        "slot",
        "stop_ids",
        "targets",
    )

    def __init__(
        self,
        request: GenerationRequest,
        *,
        arrival: int,
        limit: int,
        eos_ids: frozenset[int],
        now: float,
        held: bool = False,
    ) -> None:
        params = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.key = (request.priority, arrival)
        self.prompt = request.prompt_ids
        self.generated: list[int] = []
        self.limit = limit
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else eos_ids
        )
        self.sampling = SamplingState(params, self.prompt, self.generated, self.stop_ids)
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.computed = 0
        self.slot: int | None = None
        self.block_table: tuple[int, ...] = ()
        self.capacity = 0
        self.drafts: tuple[int, ...] = ()
        self.held = held
        self.bypassed = 0
        self.preemptions = 0
        self.queued_at = now
        self.queue_seconds = 0.0
        self.salt = request.cache_salt
        self.cached_tokens = 0
        self.checkpoint_at = sys.maxsize
        self.targets: list[int] = []
        self.reserved: list[tuple[int, int]] = []
        self.rolling: Node | None = None
        self.published: list[Node] = []
        self.block_keys: list[Key] = []
        self.rollbacks = 0
        self.retracted = 0
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []

    @property
    def uncomputed(self) -> int:
        """Prompt or replay rows still to run before the next token can be sampled."""
        if self.phase is Phase.PREFILL:
            return len(self.prompt) - self.computed
        if self.phase is Phase.REPLAY:
            return len(self.prompt) + len(self.generated) - 1 - self.computed
        return 0

    @property
    def rows_to_resume(self) -> int:
        """Rows that a waiting sequence must run before it decodes: prompt and replay."""
        return len(self.prompt) + max(len(self.generated) - 1, 0)

    def blocks_to_admit(self) -> int:
        """KV blocks for every token known so far (the last one is consumed by its next step)."""
        return blocks_for(len(self.prompt) + len(self.generated))

    def blocks_at_most(self) -> int:
        """KV blocks that the longest possible output needs."""
        return blocks_at_most(len(self.prompt), self.limit)

    def token_at(self, position: int) -> int:
        """The known token at `position`, counted from the start of the prompt."""
        length = len(self.prompt)
        return self.prompt[position] if position < length else self.generated[position - length]

    def tokens_between(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions start..end-1, all prompt or all generated."""
        length = len(self.prompt)
        if start < length:
            return self.prompt[start:end]
        return tuple(self.generated[start - length : end - length])

    def blocks_missing(self, tokens: int) -> int:
        """KV blocks that the table lacks for `tokens` tokens."""
        return max(blocks_for(tokens) - len(self.block_table), 0)

    def add_blocks(self, blocks: Iterable[int]) -> None:
        """Append blocks to the table."""
        self.block_table = (*self.block_table, *blocks)
        self.capacity = len(self.block_table) * GRID

    def drop_blocks(self, tokens: int) -> tuple[int, ...]:
        """Take the blocks that `tokens` tokens do not need off the table; returns them."""
        needed = blocks_for(tokens)
        surplus, self.block_table = self.block_table[needed:], self.block_table[:needed]
        self.capacity = len(self.block_table) * GRID
        return surplus

    def drop_holdings(self) -> None:
        """Forget slot, blocks and progress; what was generated stays."""
        self.slot = None
        self.block_table = ()
        self.capacity = 0
        self.computed = 0
        self.drafts = ()

    def cut(self, length: int, computed: int) -> None:
        """Forget all generated tokens but `length`; the model stands after `computed` tokens."""
        consumed = len(self.prompt) + length - 1
        if not (0 < length < len(self.generated) and len(self.prompt) <= computed <= consumed):
            raise InvariantError(
                f"{len(self.generated)} tokens cannot be cut to {length} with {computed} computed"
            )
        self.rollbacks += 1
        self.retracted += len(self.generated) - length
        del self.generated[length:]
        del self.block_keys[(len(self.prompt) + length) // GRID :]
        self.sampling.forget()
        self.drafts = ()
        self.computed = computed
        self.phase = Phase.DECODE if computed == consumed else Phase.REPLAY

    def count_burst(self, drafted: int, accepted: int) -> None:
        """Record that `drafted` drafts were verified and the first `accepted` of them kept."""
        if accepted > drafted:
            raise InvariantError(f"{accepted} drafts accepted of {drafted}")
        missing = drafted - len(self.drafted_per_position)
        if missing > 0:
            self.drafted_per_position.extend([0] * missing)
            self.accepted_per_position.extend([0] * missing)
        for position in range(drafted):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def stats(self) -> RequestStats:
        """The numbers that go out with the last delta."""
        return RequestStats(
            queue_seconds=self.queue_seconds,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
            drafted=sum(self.drafted_per_position),
            accepted=sum(self.accepted_per_position),
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            rollbacks=self.rollbacks,
            retracted=self.retracted,
        )


def blocks_for(tokens: int) -> int:
    """KV blocks that `tokens` tokens fill."""
    return -(-tokens // GRID)


def blocks_at_most(prompt: int, output: int) -> int:
    """KV blocks of a prompt with its longest output; the last token is never consumed."""
    return blocks_for(prompt + output - 1)
