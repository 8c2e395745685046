"""Decides which rows of which sequences run in each step, and what becomes of their tokens.

Knows no tensors, no logits and no text; it is driven by one thread, one plan and commit at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from operator import attrgetter

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError, InvariantError, RequestError
from engine.prefix_cache import PrefixCache
from engine.request import FinishReason, GenerationRequest, TokenDelta
from engine.runner import RowPhase
from engine.scheduler.admission import Admission
from engine.scheduler.holdings import Holdings, SlotMover
from engine.scheduler.limits import output_limit
from engine.scheduler.outcomes import take_tokens
from engine.scheduler.plan import StepOutcome, StepPlan
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.reuse import PrefixReuse, StatePort
from engine.scheduler.segments import build_plan
from engine.scheduler.sequence import Phase, Sequence

logger = logging.getLogger(__name__)

_by_key = attrgetter("key")


class Scheduler:
    """Continuous batching with chunked prefill, priorities and exact preemption.

    Order is (priority, arrival). Every decoding sequence has its rows in every step; prompt and
    replay rows share `max_prefill_tokens` a step in that order. So the gap between two tokens of a
    running stream is at most one step with that many prompt rows, whatever arrives.

    When KV runs out, the last running sequence in that order gives up everything and queues again;
    the first one is never preempted, so the engine as a whole always gets on. A steady stream of
    more urgent requests can keep a less urgent one waiting: that is what priorities are for.

    Args:
        config: sizes and limits; max_prefill_tokens must be a multiple of GRID.
        kv_blocks: KV blocks in all, of GRID tokens each.
        move_slot: copies the tensors of slot src to slot dst, called between steps only.
        eos_ids: the model's own end ids.
        clock: seconds, for queue times and deadlines.
        states: lets sequences reuse the prefixes of earlier ones; None computes every prompt.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv_blocks: int,
        move_slot: SlotMover,
        eos_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        states: StatePort | None = None,
    ) -> None:
        if config.max_prefill_tokens < GRID or config.max_prefill_tokens % GRID:
            raise ConfigError(
                f"max_prefill_tokens is {config.max_prefill_tokens} and must be a multiple of "
                f"{GRID}, at least {GRID}"
            )
        self.holdings = Holdings(config.max_batch_size, kv_blocks, move_slot)
        self.waiting = WaitingQueue(config.max_waiting)
        self._reuse: PrefixReuse | None = None
        if states is not None:
            self.holdings.cache = PrefixCache(self.holdings.blocks, states.places)
            self._reuse = PrefixReuse(self.holdings.cache, states)
        self._admission = Admission(
            self.holdings,
            self.waiting,
            config.max_prefill_tokens,
            clock=clock,
            reuse=self._reuse,
        )
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._config = config
        self._eos_ids = eos_ids
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._held: set[int] = set()
        self._arrivals = 0
        self._in_flight: StepPlan | None = None
        self._aborted_in_flight: list[Sequence] = []

    # ---- verbs of the caller -------------------------------------------------------------

    def add(self, request: GenerationRequest, *, held: bool = False) -> Sequence:
        """Queue a request.

        Args:
            held: it keeps its place in the queue but does not start before `let_go`.

        Raises:
            RequestError: it can never run: empty, longer than the context or than the KV pool.
            QueueFullError: too many wait already.
            InvariantError: its id is in use.
        """
        if request.request_id in self._sequences:
            raise InvariantError(f"request id {request.request_id} is in use")
        limit = output_limit(request, self._config.max_seq_len, self.holdings.blocks.total)
        self.waiting.expect_room()
        now = self._clock()
        sequence = Sequence(
            request,
            arrival=self._arrivals,
            limit=limit,
            eos_ids=self._eos_ids,
            now=now,
            held=held,
        )
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        if held:
            self._held.add(request.request_id)
        self.waiting.join(sequence, now)
        return sequence

    @property
    def held(self) -> int:
        """Requests that wait for `let_go` or `refuse`."""
        return len(self._held)

    def let_go(self, request_id: int) -> None:
        """A held request may start; one that has ended meanwhile is passed over."""
        if request_id in self._held:
            self._held.discard(request_id)
            self._sequences[request_id].held = False

    def refuse(self, request_id: int, error: RequestError) -> TokenDelta | None:
        """End a held request with what is wrong with it; None when it has ended meanwhile."""
        if request_id not in self._held:
            return None
        return self._end_with_error(self._sequences[request_id], error)

    def abort(self, request_id: int) -> TokenDelta | None:
        """End a request in whatever state it is.

        Returns the last delta; None when the id is unknown (it may just have finished) or when a
        step is in flight, whose commit then frees the sequence and returns the delta.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.finish_reason is not None:
            return None
        if self._in_flight is not None:
            sequence.finish_reason = FinishReason.ABORT
            self._aborted_in_flight.append(sequence)
            return None
        delta = self._end(sequence, FinishReason.ABORT)
        self._compact()
        return delta

    def expire(self) -> list[TokenDelta]:
        """End the requests that waited past their deadline."""
        return [
            self._end(
                sequence,
                FinishReason.ERROR,
                error=f"the request waited {sequence.request.deadline:g} s in the queue, which is "
                "its deadline; retry later",
                error_status=503,
            )
            for sequence in self.waiting.overdue(self._clock())
        ]

    def propose(self, request_id: int, drafts: Listing[int]) -> None:
        """Set the drafts that follow a decoding sequence's last token in the next step.

        Drafts beyond what max_tokens or the context length could emit are dropped.
        """
        sequence = self._sequences[request_id]
        if sequence.phase is not Phase.DECODE:
            raise InvariantError(f"request {request_id} is in {sequence.phase} and cannot draft")
        room = sequence.limit - len(sequence.generated) - 1
        sequence.drafts = tuple(drafts[:room])

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence and queue it again at its place."""
        if self._in_flight is not None:
            raise InvariantError(f"request {sequence.request_id} preempted while a step runs")
        self._give_back(sequence, failed=False)
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        logger.debug(
            "Preempted request %d after %d tokens, %d wait",
            sequence.request_id,
            len(sequence.generated),
            len(self.waiting) + 1,
        )
        self.waiting.join(sequence, self._clock())

    def roll_back(self, request_id: int, length: int, computed: int) -> None:
        """Cut a decoding sequence's output to `length` tokens.

        The caller has put its state back to where it was after `computed` tokens; the known ones
        behind it run again as committed rows.
        """
        sequence = self._sequences[request_id]
        if self._in_flight is not None or sequence.phase is not Phase.DECODE:
            raise InvariantError(f"request {request_id} in {sequence.phase} cannot be rolled back")
        sequence.cut(length, computed)
        self.holdings.shrink(sequence, len(sequence.prompt) + length)

    def stop(self, request_id: int, reason: FinishReason) -> TokenDelta:
        """End a running sequence between steps, after what it has; returns its last delta."""
        if self._in_flight is not None:
            raise InvariantError(f"request {request_id} stopped while a step runs")
        delta = self._end(self._sequences[request_id], reason)
        self._compact()
        return delta

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._sequences)

    def can_step(self) -> bool:
        """Whether any request runs or may start."""
        return len(self._sequences) > len(self._held)

    def sequence(self, request_id: int) -> Sequence:
        """The sequence of a request that waits or runs."""
        return self._sequences[request_id]

    def requests(self) -> tuple[int, ...]:
        """Ids of all requests that wait or run."""
        return tuple(self._sequences)

    def decoding(self) -> list[Sequence]:
        """The sequences whose next step is a decode, by rising slot."""
        return [s for s in self.holdings.running() if s.phase is Phase.DECODE]

    def prompt_rows_ahead(self) -> int:
        """Prompt rows that the next step may carry, going by who runs and who waits first."""
        rows = sum(s.uncomputed for s in self.holdings.running() if s.phase is not Phase.DECODE)
        if self.holdings.slots.free and len(self.waiting):
            rows += sum(s.rows_to_resume for s in self.waiting.window())
        return min(rows, self._config.max_prefill_tokens)

    def check(self) -> None:
        """Check the accounts between steps.

        Raises:
            InvariantError: a slot, a block or a sequence is lost or counted twice.
        """
        self.holdings.check()
        known = len(self.waiting) + self.holdings.slots.used
        if known != len(self._sequences):
            raise InvariantError(f"{len(self._sequences)} requests are known, {known} are placed")

    def check_idle(self) -> None:
        """Check that nothing is held when no request is left; costs nothing, unlike `check`.

        The cache may hold blocks still: exactly those that are idle.

        Raises:
            InvariantError: a slot or a block leaked.
        """
        if self._sequences:
            return
        slots, blocks = self.holdings.slots.used, self.holdings.blocks.used
        if slots or blocks:
            raise InvariantError(f"no request is left, yet {slots} slots, {blocks} KV blocks held")
        cache = self.holdings.cache
        if cache is not None and len(cache) != self.holdings.blocks.idle:
            raise InvariantError(
                f"the prefix cache has {len(cache)} KV blocks, {self.holdings.blocks.idle} are idle"
            )

    # ---- plan ----------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the rows of the next step; admits, preempts and takes blocks as needed.

        Raises:
            InvariantError: the step before was neither committed nor failed.
        """
        if self._in_flight is not None:
            raise InvariantError("a step is in flight; commit it or let it fail first")
        preempted = self._secure_decode_rows()
        prefilling = sorted(
            (s for s in self.holdings.running() if s.phase is not Phase.DECODE), key=_by_key
        )
        # After a preemption nobody is admitted for a step, or the freed blocks would go round.
        admitted, restores = ([], []) if preempted else self._admission.admit(prefilling)
        if admitted:
            prefilling = sorted(prefilling + admitted, key=_by_key)
        plan = build_plan(
            self.decoding(),
            prefilling,
            budget=self._config.max_prefill_tokens,
            claims=tuple(s.slot for s in admitted if s.slot is not None),
            restores=tuple(restores),
            set_aside=None if self._reuse is None else self._reuse.set_aside,
        )
        self._in_flight = plan
        return plan

    def _secure_decode_rows(self) -> bool:
        """Give every decoding sequence blocks for its next rows; True when one was preempted."""
        needy = [
            s
            for s in self.holdings.running()
            if s.computed + len(s.drafts) >= s.capacity and s.phase is Phase.DECODE
        ]
        if not needy:
            return False
        missing = sum(s.blocks_missing(s.computed + 1 + len(s.drafts)) for s in needy)
        if missing > self.holdings.blocks.available:
            # Drafts are a luxury: they go before anybody is preempted.
            for sequence in needy:
                sequence.drafts = sequence.drafts[
                    : max(sequence.capacity - sequence.computed - 1, 0)
                ]
        before = self.preemptions
        for sequence in sorted(needy, key=_by_key):
            self._secure_rows(sequence)
        if self.preemptions == before:
            return False
        self._compact()
        return True

    def _secure_rows(self, sequence: Sequence) -> None:
        """Give one sequence blocks for its rows, taking them from the last in order if need be."""
        while sequence.phase is Phase.DECODE:
            if self.holdings.grow(sequence, sequence.computed + 1 + len(sequence.drafts)):
                return
            self.preempt(max(self.holdings.running(), key=_by_key))

    # ---- commit --------------------------------------------------------------------------

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[TokenDelta]:
        """Take over a step's tokens, retire what ended and compact the slots.

        Returns one delta for every sequence that has new tokens or ended.

        Raises:
            InvariantError: `plan` is not the step in flight or the outcome does not match it.
        """
        self._land(plan)
        deltas: list[TokenDelta] = []
        ended: list[Sequence] = []
        logprobs = outcome.logprobs
        for index, sequence in enumerate(plan.sequences):
            if sequence.finish_reason is not None:
                continue  # aborted while the step ran: its tokens were never emitted
            if index in outcome.failures:
                deltas.append(self._end_with_error(sequence, outcome.failures[index]))
                continue
            segment = plan.segments[index]
            tokens = outcome.tokens[index]
            delta = take_tokens(sequence, segment, tokens, logprobs[index] if logprobs else ())
            if delta is not None:
                deltas.append(delta)
                self.generation_tokens += len(delta.token_ids)
                if segment.phase is not RowPhase.DECODE:  # the first token of a fresh prompt
                    self.prompt_tokens += len(sequence.prompt) - sequence.cached_tokens
                if delta.finish_reason is not None:
                    ended.append(sequence)
            if sequence.computed >= sequence.checkpoint_at and self._reuse is not None:
                self._reuse.due(sequence, plan, index, len(tokens))
        for sequence in ended:
            self._release(sequence)
        deltas += self._end_aborted()
        self._compact()
        return deltas

    def fail(self, plan: StepPlan, error: str) -> list[TokenDelta]:
        """End every sequence of a step that could not be finished; the others go on.

        Their states are unknown, so they are not retried: the next owner of a slot starts at zero.
        """
        self._land(plan)
        deltas = [
            self._end_with_error(sequence, error)
            for sequence in plan.sequences
            if sequence.finish_reason is None
        ]
        deltas += self._end_aborted()
        self._compact()
        return deltas

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise InvariantError("this step is not in flight")
        self._in_flight = None

    # ---- retirement ----------------------------------------------------------------------

    def _end_aborted(self) -> list[TokenDelta]:
        aborted, self._aborted_in_flight = self._aborted_in_flight, []
        return [self._end(sequence, FinishReason.ABORT) for sequence in aborted]

    def _end_with_error(self, sequence: Sequence, error: str | RequestError) -> TokenDelta:
        if isinstance(error, str):
            return self._end(sequence, FinishReason.ERROR, error=error)
        return self._end(
            sequence,
            FinishReason.ERROR,
            error=error.message,
            error_status=error.status,
            error_param=error.param,
            error_code=error.code,
        )

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: str | None = None,
        error_status: int = 500,
        error_param: str | None = None,
        error_code: str | None = None,
    ) -> TokenDelta:
        """Release a sequence and make its last delta."""
        sequence.finish_reason = reason
        if sequence.phase is Phase.WAITING:
            sequence.queue_seconds += self._clock() - sequence.queued_at
            self.waiting.leave(sequence)
        self._release(sequence)
        return TokenDelta(
            sequence.request_id,
            finish_reason=reason,
            error=error,
            error_status=error_status,
            error_param=error_param,
            error_code=error_code,
            stats=sequence.stats(),
        )

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._give_back(sequence, failed=sequence.finish_reason is FinishReason.ERROR)
        sequence.phase = Phase.FINISHED
        self._held.discard(sequence.request_id)
        del self._sequences[sequence.request_id]

    def _give_back(self, sequence: Sequence, *, failed: bool) -> None:
        if self._reuse is not None:
            self._reuse.leave(sequence, failed=failed)
        self.holdings.give_back(sequence)

    def _compact(self) -> None:
        if self._config.slot_compaction:
            self.holdings.compact()
