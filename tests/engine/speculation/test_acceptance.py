"""The chances of further drafts: quiet while traffic is steady, quick when it turns."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine.speculation.acceptance import AcceptanceProfile


def feed(profile: AcceptanceProfile, rng: random.Random, chance: float, steps: int) -> bool:
    """Steps of one sequence at three drafts; whether a jump up was seen."""
    risen = False
    for _ in range(steps):
        accepted = 0
        while accepted < 3 and rng.random() < chance:
            accepted += 1
        risen |= profile.see(3, [accepted])
    return risen


def test_before_anything_is_seen_drafts_are_worth_a_try() -> None:
    profile = AcceptanceProfile(3)
    tokens = [profile.tokens(depth) for depth in range(4)]
    assert tokens[0] == 1.0
    assert all(a < b for a, b in pairwise(tokens))


def test_it_learns_each_position() -> None:
    profile = AcceptanceProfile(3)
    # Of four: one loses its first draft, one its second, two keep all.
    for _ in range(400):
        profile.see(3, [0, 1, 3, 3])
    assert profile.tokens(1) == pytest.approx(1.75, abs=0.01)
    assert profile.tokens(2) == pytest.approx(2.25, abs=0.01)
    assert profile.tokens(3) == pytest.approx(2.75, abs=0.01)


def test_a_shallow_step_says_nothing_of_deeper_drafts() -> None:
    profile = AcceptanceProfile(3)
    for _ in range(400):
        profile.see(3, [0, 1, 3, 3])
    second = (profile.tokens(2) - profile.tokens(1)) / (profile.tokens(1) - 1)
    for _ in range(400):
        profile.see(1, [1])
    assert profile.tokens(1) > 1.95
    assert (profile.tokens(2) - profile.tokens(1)) / (profile.tokens(1) - 1) == pytest.approx(
        second
    )
    assert not profile.see(0, [0, 0])


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_steady_traffic_is_known_within_a_tenth(chance: float) -> None:
    want = 1 + chance + chance**2 + chance**3
    errors = []
    for seed in range(20):
        profile = AcceptanceProfile(3)
        feed(profile, random.Random(seed), chance, 600)
        errors.append(abs(profile.tokens(3) / want - 1))
    assert sum(errors) / len(errors) < 0.1


@pytest.mark.parametrize(("before", "after"), [(0.85, 0.15), (0.15, 0.85)])
def test_a_turn_is_seen_within_sixty_steps(before: float, after: float) -> None:
    want = 1 + after + after**2 + after**3
    errors = []
    for seed in range(20):
        rng, profile = random.Random(seed), AcceptanceProfile(3)
        feed(profile, rng, before, 400)
        assert feed(profile, rng, after, 60) or after < before
        errors.append(abs(profile.tokens(3) / want - 1))
    assert sum(errors) / len(errors) < 0.25
