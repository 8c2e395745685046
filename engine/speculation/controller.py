"""Picks the depth that delivers most tokens per second at each width, from what steps deliver.

Speculation must never cost throughput, so that depth 0 is one of the choices. It knows no clock, no
slots and no ladder: seconds, ceilings and first guesses come in.

Two things make a depth's rate: the tokens of a step, of which one chance per position is kept for
all widths, and its seconds, kept per width as ratios between depths measured close in time, so that
a machine that slows down for everybody changes no choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from engine.speculation.acceptance import HOPEFUL, AcceptanceProfile

# width -> seconds of a step by its depth, from 0
Costs = Mapping[int, tuple[float, ...]]

# Steps, of whatever width, between two decisions at a width; a switch happens only there.
WINDOW = 16
# A depth must promise this much more than the one in use before it replaces it.
MARGIN = 0.015
# Share of the time that may be lost to looking at other depths than the best.
PROBE_SHARE = 0.01
# Steps of a probe; its first and last may carry costs of the change of depth and time nothing.
BURST = 4
# Sequences that a look at a deeper depth must verify; what it shows decides if it goes on.
_LOOK = 16
# Steps at the depth in use that must have been timed before a probe, to compare it with.
SETTLE = 4
_REFERENCE = 9
_RATIOS = 5
# A probe's loss is booked up to so many steps each, lest one hiccup end all probing.
_LOSS_CAP = 3.0
# Loss of a probe of a depth that is as good as the one in use, so that it is not probed for ever.
_LEAST_LOSS = 0.02
# Steps after which the last timings of a width are too old to compare anything with.
_OLD = 64


@dataclass(slots=True)
class _Burst:
    """A probe: `left` more steps at `depth`, then back, or on while it gains."""

    depth: int
    left: int = BURST
    steps: int = 0
    gain: float = 0.0
    missed: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Width:
    """What is known at one width; times are relative to each other only."""

    width: int
    depth: int
    ceiling: int
    decided_at: int
    settled: bool = False
    seen_at: int = 0
    credit: float = 0.0
    spent: dict[int, float] = field(default_factory=dict)
    recheck: bool = False
    burst: _Burst | None = None
    timed: int = 0
    reference: deque[float] = field(default_factory=lambda: deque(maxlen=_REFERENCE))
    ratios: dict[int, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add_ratio(self.depth, 1.0)

    def add_ratio(self, depth: int, ratio: float) -> None:
        self.ratios.setdefault(depth, deque(maxlen=_RATIOS)).append(ratio)

    def cost(self, depth: int) -> float:
        return median(self.ratios[depth])

    def best(self, profile: AcceptanceProfile, ceiling: int) -> int:
        """The measured depth up to `ceiling` with the best rate; the shallower of equals."""
        known = sorted(depth for depth in self.ratios if depth <= ceiling)
        if not known:
            return min(self.depth, ceiling)
        return max(known, key=lambda depth: self.rate(profile, depth))

    def rate(self, profile: AcceptanceProfile, depth: int) -> float:
        return profile.tokens(depth) / self.cost(depth)


@dataclass(frozen=True, slots=True)
class _Timed:
    """The last step, whose time counts once the next one turns out to be of its kind."""

    key: int
    drafts: int
    seconds: float
    alike_before: bool


class SpecController:
    """One depth per width, changed at most once per window.

    Ask `choose` before a step's drafts are made and tell `observe` what the step came to, in turn.

    Args:
        num_drafts: the deepest choice.
        costs: what steps took when nothing else ran; without it every width begins with a look at
            each depth.
    """

    def __init__(self, num_drafts: int, costs: Costs | None = None) -> None:
        self._num_drafts = num_drafts
        self._costs = costs or {}
        prior = {"prior": HOPEFUL} if costs else {}
        self._profile = AcceptanceProfile(num_drafts, **prior)
        self._widths: dict[int, _Width] = {}
        self._last: _Timed | None = None
        self._steps = 0
        self._timed_steps = 0
        self.probes = 0
        self.reprobes = 0
        self.switches = 0

    def choose(self, width: int, ceiling: int, first_guess: int) -> int:
        """Drafts per sequence for the next step.

        Args:
            width: sequences that decode.
            ceiling: drafts that the step can verify.
            first_guess: depth to start from at a width that was never seen.
        """
        ceiling = min(ceiling, self._num_drafts)
        state = self._state(width, min(first_guess, ceiling))
        state.ceiling = ceiling
        if state.burst is not None and state.burst.depth <= ceiling:
            return state.burst.depth
        if state.depth <= ceiling:
            return state.depth
        return state.best(self._profile, ceiling)

    def observe(
        self, width: int, drafts: int, accepted: Sequence[int], seconds: float, steps: int = 1
    ) -> None:
        """Learn from a step without prompt rows.

        Args:
            width: sequences that decoded.
            drafts: what `choose` gave for it, before cuts of single sequences.
            accepted: drafts that were accepted, one entry per decoding sequence.
            seconds: of the whole step, from one `choose` to the next.
            steps: that it speaks for: nobody asks for plain ones in a row.
        """
        self._steps += steps
        self._timed_steps += 1
        risen = self._profile.see(drafts, accepted)
        key = _key(width)
        state = self._state(width, drafts)
        # Where one draft became likelier, those behind it may have too, unseen from here.
        state.recheck |= risen
        if self._timed_steps - state.seen_at > _OLD:
            # A probe that was under way has nothing left to be compared with.
            state.reference.clear()
            state.timed = 0
            state.burst = None
        state.seen_at = self._timed_steps
        self._time(key, drafts, seconds)
        if state.burst is not None:
            self._follow_burst(state, drafts, accepted, seconds)
        elif drafts == state.depth:
            self._earn(state, seconds, steps)
        self._go_on(state)

    def see(self, width: int, drafts: int, accepted: Sequence[int]) -> None:
        """Learn from a step that carried prompt rows too, so that its time tells nothing.

        Where prompts come all the time most steps are such: without them it would take minutes to
        find out that drafts pay again. Arguments as in `observe`.
        """
        self._steps += 1
        state = self._state(width, drafts)
        state.recheck |= self._profile.see(drafts, accepted)
        burst = state.burst
        if burst is None:
            if state.reference:
                self._earn(state, median(state.reference), 1)
        elif drafts == burst.depth:
            burst.left -= 1
            if burst.left <= 0:
                state.burst = None
                state.timed = 0
        self._go_on(state)

    def depths(self) -> dict[int, int]:
        """The depth in use, by the widest batch that it holds for."""
        return {key: state.depth for key, state in sorted(self._widths.items())}

    # ---- timing --------------------------------------------------------------------------

    def _time(self, key: int, drafts: int, seconds: float) -> None:
        """Book the previous step's time, if the steps before and after it were of its kind."""
        last = self._last
        alike = last is not None and (last.key, last.drafts) == (key, drafts)
        if last is not None and alike and last.alike_before:
            state = self._widths[key]
            if state.burst is not None and state.burst.depth == drafts:
                state.burst.seconds.append(last.seconds)
            elif drafts == state.depth:
                state.reference.append(last.seconds)
                state.timed += 1
        self._last = _Timed(key, drafts, seconds, alike)

    def _earn(self, state: _Width, seconds: float, steps: int) -> None:
        if state.reference:
            step = median(state.reference)
            state.credit += PROBE_SHARE * min(seconds, step) * steps
            state.credit = min(state.credit, _LOSS_CAP * BURST * step)

    # ---- probes --------------------------------------------------------------------------

    def _maybe_probe(self, state: _Width) -> None:
        if len(state.reference) < SETTLE or state.depth > state.ceiling:
            return
        unknown = [d for d in range(state.ceiling, -1, -1) if d not in state.ratios]
        if unknown:
            state.burst = _Burst(unknown[0])
            self.probes += 1
            return
        others = [d for d in range(state.ceiling + 1) if d != state.depth]
        if not others or not state.settled or state.timed < SETTLE:
            return
        losses = {d: self._expected_loss(state, d) for d in others}
        # Equal losses for every depth in the long run, so that cheap looks are the frequent ones.
        depth = min(others, key=lambda d: (state.spent.get(d, 0.0) + losses[d], d))
        if state.recheck and state.depth < state.ceiling:
            depth = state.ceiling
        elif state.credit < losses[depth]:
            return
        state.recheck = False
        state.spent[depth] = state.spent.get(depth, 0.0) + losses[depth]
        state.burst = _Burst(depth, self._length(state, depth))
        self.reprobes += 1

    def _expected_loss(self, state: _Width, depth: int) -> float:
        """Seconds that a probe of `depth` costs over the same tokens at the depth in use."""
        share = 1.0 - state.rate(self._profile, depth) / state.rate(self._profile, state.depth)
        step = median(state.reference) * state.cost(depth) / state.cost(state.depth)
        least = median(state.reference) * _LEAST_LOSS
        most = median(state.reference) * _LOSS_CAP
        return self._length(state, depth) * min(max(step * share, least), most)

    def _length(self, state: _Width, depth: int) -> int:
        """Steps of a probe: a look for acceptance alone needs few where many sequences decode."""
        if depth < state.depth:
            return BURST
        return max(1, min(BURST, -(-_LOOK // state.width)))

    def _follow_burst(
        self, state: _Width, drafts: int, accepted: Sequence[int], seconds: float
    ) -> None:
        burst = state.burst
        assert burst is not None
        if drafts != burst.depth:
            # A ceiling or a cut came in between; give up when that lasts.
            burst.missed += 1
            if burst.missed > BURST:
                state.burst = None
            return
        if state.settled:
            burst.gain -= self._pay(state, accepted, seconds)
        burst.left -= 1
        burst.steps += 1
        if burst.left > 0:
            return
        if burst.gain > 0 and burst.steps < WINDOW:
            burst.left = BURST
            return
        if burst.seconds:
            ratio = median(burst.seconds) / median(state.reference)
            state.add_ratio(burst.depth, ratio * state.cost(state.depth))
        state.burst = None
        state.timed = 0

    def _pay(self, state: _Width, accepted: Sequence[int], seconds: float) -> float:
        """Book the seconds that a probe's step lost against the depth in use; below 0 if it won."""
        step = median(state.reference)
        emitted = len(accepted) + sum(accepted)
        worth = step * emitted / (len(accepted) * self._profile.tokens(state.depth))
        loss = min(seconds - worth, _LOSS_CAP * step)
        bound = _LOSS_CAP * BURST * step
        state.credit = max(-bound, min(state.credit - loss, bound))
        return loss

    # ---- decisions -----------------------------------------------------------------------

    def _go_on(self, state: _Width) -> None:
        """Between two steps: end a window, begin a probe."""
        if state.burst is None:
            if self._steps - state.decided_at >= WINDOW:
                self._decide(state)
            self._maybe_probe(state)

    def _decide(self, state: _Width) -> None:
        """End of a window: keep the depth, or take one that promises enough more."""
        state.decided_at = self._steps
        complete = all(depth in state.ratios for depth in range(state.ceiling + 1))
        state.settled = state.settled or complete
        best = state.best(self._profile, state.ceiling)
        if best == state.depth:
            return
        if best not in state.ratios:
            # A ceiling below all that was measured: nothing to compare with, so it starts over.
            state.ratios.clear()
            state.add_ratio(best, 1.0)
            state.settled = False
        elif state.depth <= state.ceiling:
            rate, now = state.rate(self._profile, best), state.rate(self._profile, state.depth)
            if rate < now * (1 + MARGIN):
                return
        state.depth = best
        state.reference.clear()
        state.timed = 0
        self.switches += 1

    def _state(self, width: int, first_guess: int) -> _Width:
        key = _key(width)
        if key not in self._widths:
            given = given_ratios(self._costs, key)
            if given:
                self._widths[key] = self._known_width(key, given, first_guess)
                return self._widths[key]
            settled = [k for k, state in self._widths.items() if state.settled]
            near = min(settled, key=lambda k: (abs(k - key), k), default=None)
            depth = first_guess if near is None else self._widths[near].depth
            self._widths[key] = self._new_width(key, depth, first_guess)
        return self._widths[key]

    def _new_width(self, key: int, depth: int, ceiling: int) -> _Width:
        return _Width(key, depth, ceiling, decided_at=self._steps, seen_at=self._timed_steps)

    def _known_width(self, key: int, ratios: tuple[float, ...], ceiling: int) -> _Width:
        """A width whose costs are known, at the depth that promises most."""
        state = self._new_width(key, 0, ceiling)
        state.ratios.clear()
        for depth, ratio in enumerate(ratios):
            state.add_ratio(depth, ratio)
        state.depth = state.best(self._profile, len(ratios) - 1)
        return state


def given_ratios(costs: Costs, width: int) -> tuple[float, ...]:
    """Cost of each depth over that of depth 0, between the two nearest widths that were timed."""
    below = max((w for w in costs if w <= width), default=None)
    above = min((w for w in costs if w >= width), default=None)
    ends = [w for w in (below, above) if w is not None]
    if not ends:
        return ()
    ratios = [tuple(seconds / costs[w][0] for seconds in costs[w]) for w in ends]
    if len(ends) == 1 or below == above:
        return ratios[0]
    share = (width - ends[0]) / (ends[1] - ends[0])
    return tuple(a + (b - a) * share for a, b in zip(*ratios, strict=False))


def _key(width: int) -> int:
    """The widest batch that shares what is learnt: alone up to 8, then by fours and sixteens."""
    if width <= 8:
        return width
    grain = 4 if width <= 32 else 16
    return -(-width // grain) * grain
