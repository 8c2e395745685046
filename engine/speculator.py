"""Drives speculation between steps: what came of the drafts, who drafts next, and how deep.

The policy is in `engine.speculation`; here it meets the scheduler and the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

from engine.request import SpeculationStats
from engine.runner import DraftRows, ModelRunner, PlainRows, RowPhase, Segment, Verified
from engine.scheduler import Scheduler, StepKind, StepOutcome, StepPlan
from engine.scheduler.sequence import Sequence
from engine.speculation.controller import Costs
from engine.speculation.dcut import dcut_drafts
from engine.speculation.gate import MANY_RUNNING, Candidate, Choice, PlainReason, SpecGate
from engine.speculation.policy import PolicySettings
from engine.speculation.row_budget import split_verify

logger = logging.getLogger(__name__)

# Steps that follow a choice to plain-decode before it is asked for again.
PLAIN_RUN = 7
# Sequences above the dispatch cap up to which rows are remembered for a drafter that will go on. A
# few more must end before it does, and by then it has some; further up nobody would read them.
REMEMBERED_ABOVE = 8


class Speculator:
    """Chooses drafts for every step and counts what became of them.

    Args:
        policy: settings of speculation.
        max_batch_size: state slots.
        scheduler: takes the proposals.
        runner: drafts.
        clock: seconds, for what a step costs.
        costs: what steps of each depth take here, if that was timed.
    """

    def __init__(
        self,
        policy: PolicySettings,
        max_batch_size: int,
        scheduler: Scheduler,
        runner: ModelRunner,
        clock: Callable[[], float],
        costs: Costs | None = None,
    ) -> None:
        self._policy = policy
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._gate = SpecGate(policy, max_batch_size, costs)
        self._choice = self._gate.choose(())
        self._learnt_at = clock()
        self._plain_run = 0
        self._unasked = 0
        self._plain_rows: PlainRows | None = None
        self._verifies = 0
        self._draft_tokens = 0
        self._dcut_tokens = 0
        self._lengths = [0] * (policy.num_drafts + 1)
        self._steps = {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}
        self._reasons: dict[str, int] = {}
        self._rungs: dict[int, int] = {}

    def pin_depth(self, depth: int, width: int) -> int:
        """Draft so deep from now on, whatever pays; what slots below `width` can verify of it."""
        self._plain_run = 0
        return self._gate.pin(depth, width)

    def settle(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Tell the runner what of each verify is kept; comes before the commit moves any slot."""
        if plan.rows == len(plan.segments):
            return
        verified = [
            Verified(segment.slot, len(segment.token_ids), len(tokens))
            for segment, tokens in zip(plan.segments, outcome.tokens, strict=True)
            if segment.committed < len(segment.token_ids)
        ]
        if verified:
            self._runner.accept(verified)

    def learn(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Count what the step's drafts came to; comes right after the commit."""
        now = self._clock()
        seconds, self._learnt_at = now - self._learnt_at, now
        if self._stays_plain(plan):
            self._count_plain(seconds)
        else:
            self._learn(plan, outcome, seconds, now)

    def prepare(self, plan: StepPlan, outcome: StepOutcome, hidden: Tensor) -> None:
        """Draft for the next step; comes after `learn` and before the next plan.

        hidden [plan rows, H] is that of the step. Sequences may have ended or been cut since.
        """
        running = self._scheduler.holdings.slots.used
        far_too_wide = running > self._policy.mtp_max_seqs + REMEMBERED_ABOVE
        if self._plain_run and running == len(plan.segments):
            if not far_too_wide:
                self._remember_all(plan, outcome, hidden)
            return
        self._plain_run = 0
        decoding = self._scheduler.decoding()
        choice = self._choose(decoding)
        if far_too_wide and not choice.depth:
            return
        wanted: dict[int, int] = {}
        if choice.depth:
            wanted = dict(zip((s.request_id for s in decoding), choice.drafts, strict=True))
        # Prompts are drafted over as they come where few run; elsewhere that costs more than it
        # brings, and the drafter begins with what it remembers, the prompt's last rows.
        idle = not decoding and self._rungs.get(running, 1) > 0
        eager = choice.depth > 0 or idle
        first_rows = accumulate((len(s.token_ids) for s in plan.segments), initial=0)
        rows: list[DraftRows] = []
        owners: list[Sequence] = []
        plain: list[tuple[int, int, int, int]] = []
        parts = zip(plan.sequences, plan.segments, outcome.tokens, first_rows, strict=False)
        for sequence, segment, tokens, first_row in parts:
            slot = sequence.slot
            decodes = segment.phase is RowPhase.DECODE
            if decodes and not eager and len(tokens) == 1:
                # In short, since a wide step has many of these.
                if slot is not None and sequence.computed > segment.start:
                    plain.append((slot, segment.start, first_row, tokens[0]))
                continue
            next_tokens = _next_tokens(segment, tokens)
            if slot is None or sequence.computed < segment.start + len(next_tokens):
                continue  # it ended, or a watchdog cut it
            engaged = eager and self._gate.covers(slot)
            if not decodes and running > MANY_RUNNING:
                engaged = False
            if not engaged and decodes and len(tokens) == 1:
                plain.append((slot, segment.start, first_row, tokens[0]))
                continue
            rows.append(
                DraftRows(
                    slot=slot,
                    start=segment.start,
                    first_row=first_row,
                    next_tokens=next_tokens,
                    block_table=sequence.block_table,
                    engaged=engaged,
                    drafts=wanted.get(sequence.request_id, 0) if engaged else 0,
                )
            )
            owners.append(sequence)
        if plain:
            table = np.array(plain, np.int64)
            slots, positions, at = table[:, 0], table[:, 1], table[:, 2]
            self._runner.remember(
                PlainRows(slots, positions, at, [row[3] for row in plain]), hidden
            )
        if rows:
            self._propose(rows, owners, hidden)

    def _stays_plain(self, plan: StepPlan) -> bool:
        """Whether the last choice, not to draft, stands for this step too.

        Choosing and learning take a few percent of a narrow model's step, so that while plain
        decoding is the choice only every eighth step asks again.
        """
        choice = self._choice
        settled = choice.reason in (PlainReason.CONTROLLER, PlainReason.TOO_WIDE)
        same = plan.kind is StepKind.DECODE and len(plan.segments) == len(choice.drafts)
        # Where a sequence ended, slots may have moved.
        stays = self._scheduler.holdings.slots.used == len(plan.segments)
        if settled and same and stays and self._plain_run < PLAIN_RUN:
            self._plain_run += 1
            return True
        self._unasked, self._plain_run = self._plain_run, 0
        return False

    def _count_plain(self, seconds: float) -> None:
        self._steps[False] += 1
        self._seconds[False] += seconds
        reason = self._choice.reason.value if self._choice.reason is not None else "dropped"
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def _remember_all(self, plan: StepPlan, outcome: StepOutcome, hidden: Tensor) -> None:
        """Remember the one row of every sequence of a plain step.

        Inside a run of such steps sequences and slots stay as they are, and positions count up.
        """
        tokens = [found[0] for found in outcome.tokens]
        before = self._plain_rows
        if self._plain_run > 1 and before is not None:
            rows = replace(before, positions=before.positions + 1, next_tokens=tokens)
        else:
            rows = PlainRows(
                slots=np.array([segment.slot for segment in plan.segments], np.int64),
                positions=np.array([segment.start for segment in plan.segments], np.int64),
                rows=None,
                next_tokens=tokens,
            )
        self._plain_rows = rows
        self._runner.remember(rows, hidden)

    def _learn(self, plan: StepPlan, outcome: StepOutcome, seconds: float, now: float) -> None:
        """Count what the step's drafts came to; its seconds run from the choice before it."""
        choice = self._choice
        if choice.reason is PlainReason.TOO_WIDE:
            self._count_plain(seconds)
            return
        decodes = [
            (len(segment.token_ids) - 1, len(tokens) - 1)
            for segment, tokens in zip(plan.segments, outcome.tokens, strict=True)
            if segment.phase is RowPhase.DECODE
        ]
        if not decodes:
            return
        verifies = [(drafts, accepted) for drafts, accepted in decodes if drafts]
        for kept in _kept_drafts(plan) if verifies else ():
            self._lengths[kept] += 1
        for drafts, accepted in verifies:
            self._verifies += 1
            self._draft_tokens += drafts
            flush = self._gate.record(len(decodes), drafts, accepted, now)
            if flush is not None:
                logger.debug("Accepts at width %d: %s", len(decodes), flush)
        speculated = bool(verifies)
        if speculated:
            self._steps[True] += 1
            self._seconds[True] += seconds
        else:
            self._count_plain(seconds)
        # A step with prompt rows, or without one of its sequences, tells no price of drafts.
        if len(decodes) == len(choice.drafts):
            bursts = [accepted for _, accepted in decodes]
            if len(decodes) == len(plan.segments):
                self._gate.observe(choice, bursts, seconds, 1 + self._unasked)
            else:
                self._gate.see(choice, bursts)

    def stats(self) -> SpeculationStats:
        """Gauges and counters as of now."""
        lengths = self._lengths
        positions = tuple(sum(lengths[p:]) for p in range(1, len(lengths)))
        choice = self._choice
        return SpeculationStats(
            verifies=self._verifies,
            draft_tokens=self._draft_tokens,
            accepted_tokens=sum(positions),
            accepted_per_position=positions,
            accepted_lengths=tuple(lengths),
            engaged=choice.engaged,
            engagements=self._gate.engagements,
            disengagements=self._gate.disengagements,
            covered=choice.covered,
            uncovered=choice.uncovered,
            rungs=tuple(sorted(self._rungs.items())),
            steps_speculative=self._steps[True],
            steps_plain=self._steps[False],
            seconds_speculative=self._seconds[True],
            seconds_plain=self._seconds[False],
            reasons=tuple(sorted(self._reasons.items())),
            dcut_tokens=self._dcut_tokens,
            probes=self._gate.probes,
            reprobes=self._gate.reprobes,
            state_bytes=self._runner.state_bytes,
        )

    def _choose(self, decoding: Listing[Sequence]) -> Choice:
        too_wide = len(decoding) > self._policy.mtp_max_seqs
        choice = self._gate.choose(
            [
                Candidate(s.slot, 0 if too_wide else _room(s))
                for s in decoding
                if s.slot is not None
            ],
            0 if too_wide else self._scheduler.prompt_rows_ahead(),
            self._scheduler.holdings.slots.used,
        )
        if choice.notice is not None:
            logger.info(choice.notice)
        if decoding and choice.reason is not PlainReason.PROMPTS:
            self._rungs[len(decoding)] = choice.depth
        self._choice = choice
        return choice

    def _propose(self, rows: Listing[DraftRows], owners: Listing[Sequence], hidden: Tensor) -> None:
        proposals = self._runner.draft(rows, hidden)
        drafting = [i for i, proposal in enumerate(proposals) if proposal.tokens]
        counts = dcut_drafts(
            [len(proposals[i].tokens) for i in drafting],
            [proposals[i].logprobs for i in drafting],
            max_seqs=self._policy.dcut_width_cap,
        )
        for i, count in zip(drafting, counts, strict=True):
            tokens = proposals[i].tokens
            self._dcut_tokens += len(tokens) - count
            self._scheduler.propose(owners[i].request_id, tokens[:count])


def forwards_of(plan: StepPlan) -> list[slice]:
    """The step's segments cut into forwards within the row budget of a verify."""
    at = [i for i, s in enumerate(plan.segments) if s.committed < len(s.token_ids)]
    runs = split_verify([len(plan.segments[i].token_ids) for i in at])
    cuts = [0, *(at[run.start] for run in runs[1:]), len(plan.segments)]
    return [slice(start, end) for start, end in pairwise(cuts)]


def _room(sequence: Sequence) -> int:
    """Drafts that the sequence's length and its KV blocks leave room for.

    The drafter's re-fed rows lie behind the last consumed token and need pages too.
    """
    left = sequence.limit - len(sequence.generated) - 1
    return max(0, min(left, sequence.capacity - sequence.computed + 1))


def _kept_drafts(plan: StepPlan) -> Iterator[int]:
    """Drafts that every verified sequence emitted: fewer than matched when a burst was cut."""
    for sequence, segment in zip(plan.sequences, plan.segments, strict=True):
        if segment.phase is RowPhase.DECODE and len(segment.token_ids) > 1:
            before = segment.start + 1 - len(sequence.prompt)
            yield max(len(sequence.generated) - before - 1, 0)


def _next_tokens(segment: Segment, tokens: Listing[int]) -> tuple[int, ...]:
    """The token after each row that is final."""
    if segment.phase is RowPhase.DECODE:
        return tuple(tokens)
    last = tokens[0] if segment.next_token is None else segment.next_token
    return (*segment.token_ids[1:], last)
