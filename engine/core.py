"""The engine's step: plan, forward, sample, commit. Owns scheduler and sampler, drives a runner.

Knows no tensors beyond the logits it passes on, no processes and no text; one thread calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.errors import EngineUnavailableError, InvariantError, RequestError
from engine.request import EngineStats, GenerationRequest, TokenDelta, TokenLogprobs
from engine.runner import ForwardResult, ModelRunner, SavedState, StateKeeper
from engine.sampling.sampler import Sampler, accepted_burst
from engine.sampling.shaping import TokenMask
from engine.scheduler import Scheduler, StatePort, StepKind, StepOutcome, StepPlan
from engine.speculation.controller import Costs
from engine.speculator import Speculator, forwards_of
from engine.watchdogs.watchdogs import Watchdogs

# How long a step waits for a grammar when there is nothing else to do, and so how long a request
# that comes meanwhile may have to wait.
_HELD_SECONDS = 0.005

logger = logging.getLogger(__name__)


class TokenMasks(Protocol):
    """Says which tokens a request's grammar allows, as a function of the tokens so far."""

    def open(self, request: GenerationRequest) -> bool:
        """Whether a request's masks are ready; if not, it is held until `settled` names it.

        Raises RequestError when its grammar cannot be used.
        """
        ...

    def settled(self) -> Listing[tuple[int, RequestError | None]]:
        """The held requests that are ready now, or what is wrong with them; each is named once."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep until `settled` has news, `seconds` at most."""
        ...

    def allowed(self, request_id: int, output: Listing[int]) -> TokenMask | None:
        """What may follow `output`, bool [vocabulary] or packed int32; None allows everything."""
        ...

    def close(self, request_id: int) -> None:
        """The request is over."""
        ...


class EngineCore:
    """Takes requests, runs steps, returns what each step added.

    Args:
        config: sizes and limits.
        runner: the loaded model with its pools.
        kv_blocks: KV blocks of GRID tokens that the runner's pool has.
        eos_ids: the model's own end ids.
        masks: constrains requests that carry a grammar; without it they are refused.
        watchdogs: steers output that repeats itself; without them nothing looks.
        compiles: kernel variants that came into being since the start.
        clock: seconds, for queue times, deadlines and step times.
        keeper: the model again, where it can set states aside; no prefix is reused without.
        reuse_decoded: the prefix cache may also keep what decode steps computed.
        costs: what steps of each depth take here, for the controller of speculation.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        kv_blocks: int,
        eos_ids: frozenset[int] = frozenset(),
        masks: TokenMasks | None = None,
        watchdogs: Watchdogs | None = None,
        compiles: Callable[[], int] = int,
        clock: Callable[[], float] = time.monotonic,
        keeper: StateKeeper | None = None,
        reuse_decoded: bool = False,
        costs: Costs | None = None,
    ) -> None:
        states: StatePort | None = None
        self._keeper = keeper
        if keeper is not None and config.prefix_caching and config.snapshot_slots:
            drafted = keeper.drafted_rows if config.speculation is not None else None
            cuts = watchdogs is not None and watchdogs.rolls_back
            states = StatePort(
                config.snapshot_slots,
                reuse_decoded,
                self._save_state,
                self._note_hidden,
                drafted,
                cuts,
            )
        self.scheduler = Scheduler(
            config,
            kv_blocks=kv_blocks,
            move_slot=runner.move_slot,
            eos_ids=eos_ids,
            clock=clock,
            states=states,
        )
        self._speculator: Speculator | None = None
        if config.speculation is not None:
            self._speculator = Speculator(
                config.speculation, config.max_batch_size, self.scheduler, runner, clock, costs
            )
        self._runner = runner
        self._sampler = Sampler(runner.vocab_size)
        self._masks = masks
        self._masked: set[int] = set()
        self._watchdogs = watchdogs
        self._clock = clock
        self._compiles = compiles
        self._outbox: list[TokenDelta] = []
        self._hidden = torch.empty(0)
        self._unprepared: tuple[StepPlan, StepOutcome] | None = None
        self._drafting_seconds = 0.0
        self._draining = False
        self._steps = 0
        self._steps_by_kind = dict.fromkeys(StepKind, 0)
        self._step_seconds = 0.0
        self._last_seconds = 0.0
        self._last_rows = 0

    # ---- requests ------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run, or asks for what this engine lacks.
            QueueFullError: too many wait already.
            EngineUnavailableError: the engine is draining.
        """
        if self._draining:
            raise EngineUnavailableError("the engine is shutting down and takes no new requests")
        self._expect_known_tokens(request)
        if request.grammar is None:
            self.scheduler.add(request)
            return
        if self._masks is None:
            raise RequestError(
                "this server cannot constrain output by a grammar; leave response_format out",
                param="response_format",
            )
        ready = self._masks.open(request)
        try:
            self.scheduler.add(request, held=not ready)
        except Exception:
            self._masks.close(request.request_id)
            raise
        self._masked.add(request.request_id)

    def abort(self, request_id: int) -> None:
        """End a request in any state; its last delta comes with the next step.

        An unknown id is no error: the request may have finished while the abort was on its way.
        """
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self._outbox.append(delta)

    # ---- draining ------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new requests from now on; those queued or running go on until they end."""
        self._draining = True

    def abort_all(self) -> None:
        """End every request; the last deltas come with the next step."""
        for request_id in self.scheduler.requests():
            self.abort(request_id)

    def pin_depth(self, depth: int, width: int) -> int:
        """From now on every step drafts this deep; what slots below `width` can verify of it."""
        return 0 if self._speculator is None else self._speculator.pin_depth(depth, width)

    def has_work(self) -> bool:
        """Whether a step would do or return anything."""
        return bool(self._outbox) or self.scheduler.has_work()

    # ---- the step ------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Run one step: one delta for every request that got tokens or ended.

        A forward that raises ends its own sequences with an error and leaves the others alone.

        Raises:
            InvariantError: the accounts are wrong; the engine must not go on.
        """
        self.prepare()
        deltas, self._outbox = self._outbox, []
        deltas += self.scheduler.expire()
        if self._masks is not None and self.scheduler.held:
            deltas += self._settle(self._masks)
        if self.scheduler.can_step():
            start = self._clock()
            plan = self.scheduler.plan()
            if not plan.segments:
                raise InvariantError("requests wait or run and the plan is empty")
            deltas += self._run(plan)
            self._count(plan, self._clock() - start)
        if self._masks is not None:
            self._close_masks(self._masks, deltas)
        if not self.scheduler.has_work():
            self.prepare()
        self.scheduler.check_idle()
        return deltas

    def prepare(self) -> None:
        """Draft for the next step.

        `step` does it where the caller did not; who sends a step's deltas first and then calls
        this lets no client wait for drafts.
        """
        if self._unprepared is None or self._speculator is None:
            return
        start = self._clock()
        (plan, outcome), self._unprepared = self._unprepared, None
        self._speculator.prepare(plan, outcome, self._hidden)
        self._drafting_seconds = self._clock() - start

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        slots, blocks = self.scheduler.holdings.slots, self.scheduler.holdings.blocks
        cache = self.scheduler.holdings.cache
        return EngineStats(
            running=slots.used,
            waiting=len(self.scheduler.waiting),
            slots_total=slots.total,
            slots_used=slots.used,
            kv_blocks_total=blocks.total,
            kv_blocks_used=blocks.used,
            steps=self._steps,
            steps_by_kind=tuple((kind.value, n) for kind, n in self._steps_by_kind.items()),
            step_seconds_total=self._step_seconds,
            last_step_seconds=self._last_seconds,
            last_step_rows=self._last_rows,
            preemptions=self.scheduler.preemptions,
            prompt_tokens=self.scheduler.prompt_tokens,
            generation_tokens=self.scheduler.generation_tokens,
            speculation=self._speculator.stats() if self._speculator is not None else None,
            held=self.scheduler.held,
            jit_compiles=self._compiles(),
            prefix_cache=cache.stats() if cache is not None else None,
            watchdogs=self._watchdogs.stats() if self._watchdogs is not None else None,
        )

    def _settle(self, masks: TokenMasks) -> list[TokenDelta]:
        """Let go of the held requests whose grammar is ready, and refuse those it failed for."""
        if not self.scheduler.can_step():
            masks.wait(_HELD_SECONDS)
        refused: list[TokenDelta] = []
        for request_id, error in masks.settled():
            if error is None:
                self.scheduler.let_go(request_id)
            elif (delta := self.scheduler.refuse(request_id, error)) is not None:
                refused.append(delta)
        return refused

    def _run(self, plan: StepPlan) -> list[TokenDelta]:
        speculator = self._speculator
        try:
            for slot in plan.claims:
                self._runner.claim_slot(slot)
            for restored in plan.restores:
                self._kept().restore(restored)
            result = self._forward(plan)
            outcome = self._sample(plan, result)
            if speculator is not None:
                speculator.settle(plan, outcome)
        except Exception as error:
            logger.exception(
                "A step of %d rows and %d sequences failed", plan.rows, len(plan.sequences)
            )
            kind = type(error).__name__
            return self.scheduler.fail(plan, f"the model's step failed with {kind}; try again")
        self._hidden = result.hidden
        deltas = self.scheduler.commit(plan, outcome)
        if speculator is not None:
            speculator.learn(plan, outcome)
            self._unprepared = (plan, outcome)
        if self._watchdogs is not None:
            deltas = self._watchdogs.observe(deltas, self.scheduler)
        return deltas

    def _save_state(self, saved: SavedState) -> None:
        self._kept().save_state(saved, self._hidden)

    def _note_hidden(self, place: int, hidden_row: int) -> None:
        self._kept().note_hidden(place, self._hidden[hidden_row])

    def _kept(self) -> StateKeeper:
        assert self._keeper is not None, "a prefix is reused and nobody keeps states"
        return self._keeper

    def _forward(self, plan: StepPlan) -> ForwardResult:
        """One forward, or several side by side when the verify is wider than the row budget."""
        cuts = forwards_of(plan)
        if len(cuts) == 1:
            return self._runner.forward(plan.segments[cuts[0]])
        parts = [_kept(self._runner.forward(plan.segments[cut])) for cut in cuts]
        return ForwardResult(
            torch.cat([part.logits for part in parts]), torch.cat([part.hidden for part in parts])
        )

    def _sample(self, plan: StepPlan, result: ForwardResult) -> StepOutcome:
        """Draw a target for every logits row and keep each burst up to its first wrong draft."""
        allowed, broken = self._allowed(plan) if self._masked else ({}, {})
        sampled = self._sampler.sample(result.logits, plan.sampling_rows, allowed)
        targets = sampled.tokens
        tokens: list[Listing[int]] = []
        logprobs: list[Listing[TokenLogprobs]] = []
        failures: dict[int, str | RequestError] = dict(broken)
        row = 0
        for index, segment in enumerate(plan.segments):
            end = row + segment.logit_rows
            burst: Listing[int] = targets[row:end]
            if len(burst) > 1:
                burst = accepted_burst(segment.token_ids[1:], burst)
            tokens.append(burst)
            kept = range(row, row + len(burst))
            if sampled.logprobs:
                logprobs.append([sampled.logprobs[r] for r in kept if r in sampled.logprobs])
            if sampled.failed and not sampled.failed.isdisjoint(kept) and index not in failures:
                failures[index] = "the model produced no finite logits for this request"
            row = end
        return StepOutcome(tokens, logprobs, failures)

    def _allowed(
        self, plan: StepPlan
    ) -> tuple[dict[int, TokenMask], dict[int, str | RequestError]]:
        """The grammars' masks by logits row, and by segment what to tell where one failed."""
        masks: dict[int, TokenMask] = {}
        failures: dict[int, str | RequestError] = {}
        end = 0
        for number, (sequence, segment) in enumerate(
            zip(plan.sequences, plan.segments, strict=True)
        ):
            rows = range(end, end + segment.logit_rows)
            end = rows.stop
            if self._masks is None or sequence.request_id not in self._masked:
                continue
            try:
                for row in rows:
                    output = [*sequence.generated, *plan.sampling_rows[row].drafts]
                    mask = self._masks.allowed(sequence.request_id, output)
                    if mask is not None:
                        masks[row] = mask
            except RequestError as error:
                failures[number] = error
            except Exception:
                logger.exception("The grammar of request %d failed", sequence.request_id)
                failures[number] = "the grammar of this request failed; try again"
        return masks, failures

    def _close_masks(self, masks: TokenMasks, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None and delta.request_id in self._masked:
                self._masked.discard(delta.request_id)
                masks.close(delta.request_id)

    def _count(self, plan: StepPlan, seconds: float) -> None:
        """Count a step; the drafts that it verifies were made before it and count with it."""
        seconds += self._drafting_seconds
        self._drafting_seconds = 0.0
        self._steps += 1
        self._steps_by_kind[plan.kind] += 1
        self._step_seconds += seconds
        self._last_seconds = seconds
        self._last_rows = plan.rows

    def _expect_known_tokens(self, request: GenerationRequest) -> None:
        """A token outside the vocabulary would read another row's memory or fail mid-step."""
        size = self._runner.vocab_size
        given = (
            ("prompt", request.prompt_ids),
            ("logit_bias", [token for token, _ in request.sampling.logit_bias]),
            ("stop_token_ids", request.sampling.stop_token_ids),
        )
        for param, tokens in given:
            if tokens and not 0 <= min(tokens) <= max(tokens) < size:
                wrong = min(tokens) if min(tokens) < 0 else max(tokens)
                raise RequestError(
                    f"{param} has token id {wrong} and the vocabulary has {size} ids, 0 to "
                    f"{size - 1}",
                    param=param,
                )


def _kept(part: ForwardResult) -> ForwardResult:
    """A result that outlives the next forward, which on a card may write to the same memory."""
    if part.logits.device.type == "cpu":
        return part
    return ForwardResult(part.logits.clone(), part.hidden.clone())
