"""Says how many drafts each sequence of a step carries, and why none. Knows no tensors.

From the widths down: dispatch cap, rung or controller, capacities of the covered slots, and what
each sequence has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from engine.speculation.adaptive_rung import AcceptBuckets, AdaptiveRung, Flush
from engine.speculation.capacity import clamp_drafts_to_slot_capacity
from engine.speculation.controller import Costs, SpecController
from engine.speculation.policy import PolicySettings


class PlainReason(StrEnum):
    """Why no sequence of a step carries a draft.

    OFF: no drafts at all. IDLE: nothing decodes. TOO_WIDE: more sequences than mtp_max_seqs.
    UNCOVERED: every sequence sits in a slot that cannot be verified. CONTROLLER: plain decoding is
    faster at this width. NO_ROOM: no sequence has room for one more token or row. PROMPTS: prompt
    rows will fill the step, and where every row costs a draft costs more than it brings.
    """

    OFF = "off"
    IDLE = "idle"
    TOO_WIDE = "too_wide"
    UNCOVERED = "uncovered"
    CONTROLLER = "controller"
    NO_ROOM = "no_room"
    PROMPTS = "prompts"


# Why a step carries no drafts, where that says nothing about the depth that was chosen.
_TELLS_NOTHING = (PlainReason.NO_ROOM, PlainReason.PROMPTS)
# A step with so many prompt rows is bound by arithmetic: a draft saves no reading of weights there,
# and with its drafting costs more rows than the tokens it brings. Where few run, most steps are of
# another kind, and a token that a draft brings here is one less to make in those.
MANY_PROMPT_ROWS, MANY_RUNNING = 64, 8


class Candidate(NamedTuple):
    """A sequence that decodes.

    Attributes:
        slot: its state slot.
        room: drafts for which its max_tokens, max_seq_len and KV blocks leave room, at least 0;
            with r tokens left to emit that is r - 1, as the row after the drafts emits one too.
    """

    slot: int
    room: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a step of these sequences carries.

    Attributes:
        drafts: per candidate, in their order.
        depth: drafts of a sequence that has room; hand it back to `SpecGate.observe`.
        engaged: the width is one that speculates, whatever the depth is.
        covered, uncovered: candidates in slots that can and cannot be verified.
        reason: why `drafts` has no positive entry, else None.
        notice: a line to log when `engaged` changed, else None.
    """

    drafts: tuple[int, ...]
    depth: int
    engaged: bool
    covered: int
    uncovered: int
    reason: PlainReason | None
    notice: str | None = None


class SpecGate:
    """Joins the settings with what is learnt from verifies.

    Args:
        settings: of speculation.
        max_batch_size: state slots.
        costs: what steps of each depth take, for the controller.
    """

    def __init__(
        self, settings: PolicySettings, max_batch_size: int, costs: Costs | None = None
    ) -> None:
        self._settings = settings
        self._slots = settings.state_slots(max_batch_size)
        self._capacities = [settings.slot_capacity(slot) for slot in range(self._slots)]
        self._buckets = AcceptBuckets(settings.mtp_max_seqs)
        self._rung = AdaptiveRung(
            settings.num_drafts, settings.ladder, pinned=not settings.adaptive_rung_acts
        )
        self._controller = (
            SpecController(settings.num_drafts, costs) if settings.controller_acts else None
        )
        self._pinned: int | None = None
        self._engaged = False
        self.engagements = 0
        self.disengagements = 0

    @property
    def probes(self) -> int:
        """First looks at a depth at some width, and flushes of the rung at two drafts."""
        return self._rung.probes + (self._controller.probes if self._controller else 0)

    @property
    def reprobes(self) -> int:
        """Later looks of the controller at a depth that is not in use."""
        return self._controller.reprobes if self._controller else 0

    @property
    def switches(self) -> int:
        """Changes of depth by the controller."""
        return self._controller.switches if self._controller else 0

    def covers(self, slot: int) -> bool:
        """Whether a sequence in this slot may ever be verified."""
        return slot < self._slots

    def pin(self, depth: int, width: int) -> int:
        """Choose this depth from now on; what slots below `width` can verify of it."""
        self._pinned = depth
        return clamp_drafts_to_slot_capacity(depth, self._capacities[:width])

    def choose(
        self, candidates: Sequence[Candidate], prompt_rows: int = 0, running: int = 0
    ) -> Choice:
        """Drafts of the next step.

        Args:
            candidates: exactly the sequences that it decodes.
            prompt_rows: that it will carry beside them.
            running: sequences that hold a slot, those with prompt rows too.
        """
        width = len(candidates)
        slots = self._slots
        covered = [c.slot for c in candidates if c.slot < slots]
        engaged = self._settings.num_drafts > 0 and 0 < width <= self._settings.mtp_max_seqs
        notice = self._engage(engaged, width) if width and self._pinned is None else None
        many = prompt_rows >= MANY_PROMPT_ROWS and running > MANY_RUNNING
        crowded = many and self._controller is not None
        depth = self._depth(width, covered) if engaged and covered and not crowded else 0
        drafts = (0,) * width
        if depth:
            drafts = tuple(min(depth, max(c.room, 0)) if c.slot < slots else 0 for c in candidates)
        return Choice(
            drafts=drafts,
            depth=depth,
            engaged=engaged,
            covered=len(covered),
            uncovered=width - len(covered),
            reason=None if any(drafts) else self._reason(width, len(covered), depth, crowded),
            notice=notice,
        )

    def record(self, width: int, drafts: int, accepted: int, now: float) -> Flush | None:
        """Count one sequence's verify; the flush that it completed, to be logged.

        Args:
            width: sequences that decoded in the step.
            drafts: rows that were verified.
            accepted: of them.
            now: seconds of a steady clock.
        """
        flush = self._buckets.record(width, drafts, accepted, now)
        if flush is not None:
            self._rung.observe(flush)
        return flush

    def observe(
        self, choice: Choice, accepted: Sequence[int], seconds: float, steps: int = 1
    ) -> None:
        """Learn what a step delivered; leave out steps with prompt rows.

        Args:
            choice: the one that the step was run by.
            accepted: drafts that were accepted, one entry per candidate of `choice`.
            seconds: of the step with its drafting.
            steps: that it speaks for, itself and plain ones like it before it.
        """
        if (
            self._controller is None
            or self._pinned is not None
            or not choice.engaged
            or not choice.covered
        ):
            return
        # A step whose drafts were all cut for another reason is no step of its depth.
        if choice.reason not in _TELLS_NOTHING:
            self._controller.observe(len(accepted), choice.depth, accepted, seconds, steps)

    def see(self, choice: Choice, accepted: Sequence[int]) -> None:
        """Learn what a step with prompt rows accepted; arguments as in `observe`."""
        if self._controller is None or self._pinned is not None:
            return
        if choice.engaged and choice.covered and choice.reason not in _TELLS_NOTHING:
            self._controller.see(len(accepted), choice.depth, accepted)

    def _depth(self, width: int, covered: Sequence[int]) -> int:
        capacities = [self._capacities[slot] for slot in covered]
        if self._pinned is not None:
            return clamp_drafts_to_slot_capacity(self._pinned, capacities)
        rung = clamp_drafts_to_slot_capacity(self._rung.drafts(width), capacities)
        if self._controller is None:
            return rung
        ceiling = clamp_drafts_to_slot_capacity(self._settings.num_drafts, capacities)
        return self._controller.choose(width, ceiling, rung)

    def _engage(self, engaged: bool, width: int) -> str | None:
        if engaged == self._engaged:
            return None
        self._engaged = engaged
        cap = self._settings.mtp_max_seqs
        if engaged:
            self.engagements += 1
            return f"Speculation engaged at {width} sequences, its limit is {cap}"
        self.disengagements += 1
        return f"Speculation disengaged at {width} sequences, its limit is {cap}"

    def _reason(self, width: int, covered: int, depth: int, crowded: bool) -> PlainReason:
        if self._settings.num_drafts == 0:
            return PlainReason.OFF
        if width == 0:
            return PlainReason.IDLE
        if width > self._settings.mtp_max_seqs:
            return PlainReason.TOO_WIDE
        if covered == 0:
            return PlainReason.UNCOVERED
        if crowded:
            return PlainReason.PROMPTS
        return PlainReason.CONTROLLER if depth == 0 else PlainReason.NO_ROOM
