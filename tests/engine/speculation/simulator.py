"""A machine of given step costs and acceptance, to run a depth controller against."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.speculation.controller import SpecController

# Chance of each draft once those before it were accepted, as a function of the step's number.
Chances = Callable[[int], tuple[float, ...]]
# Seconds of a step of (width, drafts).
Cost = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Step:
    """One simulated step: its depth, tokens, seconds, and the controller's depth after it."""

    drafts: int
    tokens: int
    seconds: float
    depth: int


def expected_tokens(chances: tuple[float, ...], drafts: int) -> float:
    """Tokens per sequence and step."""
    total = survival = 1.0
    for chance in chances[:drafts]:
        survival *= chance
        total += survival
    return total


def best_rate(width: int, chances: tuple[float, ...], cost: Cost) -> float:
    """Tokens per second of the best fixed depth."""
    return max(
        width * expected_tokens(chances, d) / cost(width, d) for d in range(len(chances) + 1)
    )


def simulate(
    controller: SpecController,
    steps: int,
    width: int,
    chances: Chances,
    cost: Cost,
    *,
    seed: int,
    noise: float = 0.05,
    ceiling: int = 3,
    first_guess: int = 3,
    offset: int = 0,
) -> list[Step]:
    """Run the controller at one width; `noise` is the spread of a step's seconds."""
    rng = random.Random(seed)
    trace = []
    for number in range(offset, offset + steps):
        drafts = controller.choose(width, ceiling, first_guess)
        odds = chances(number)[:drafts]
        accepted = [_accepted(rng, odds) for _ in range(width)]
        seconds = cost(width, drafts) * max(rng.gauss(1.0, noise), 0.5)
        controller.observe(width, drafts, accepted, seconds)
        depths = controller.depths()
        depth = depths[min(key for key in depths if key >= width)]
        trace.append(Step(drafts, width + sum(accepted), seconds, depth))
    return trace


def _accepted(rng: random.Random, odds: tuple[float, ...]) -> int:
    for count, chance in enumerate(odds):
        if rng.random() >= chance:
            return count
    return len(odds)
