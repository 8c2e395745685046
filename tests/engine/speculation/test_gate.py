"""Drafts of a step: no bound is ever exceeded, and a step without drafts says why."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.adaptive_rung import FLUSH_VERIFIES
from engine.speculation.gate import Candidate, PlainReason, SpecGate
from engine.speculation.policy import ControllerMode, PolicySettings

OFF = ControllerMode.OFF
SNAPSHOT = SsmRollbackMode.SNAPSHOT


def seated(slots: int | list[int], room: int = 99) -> list[Candidate]:
    """Sequences on these slots, or on so many of the lowest."""
    return [Candidate(s, room) for s in (range(slots) if isinstance(slots, int) else slots)]


def test_the_ladder_alone() -> None:
    gate = SpecGate(PolicySettings(3, controller=OFF, static_rung=True), 128)
    for width, depth in ((1, 3), (4, 3), (8, 3), (9, 1), (32, 1), (33, 0), (128, 0)):
        choice = gate.choose(seated(width))
        assert choice.depth == depth
        assert choice.drafts == (depth,) * width if width <= 32 else (0,) * width


def test_uncovered_sequences_carry_none_and_count_in_the_width() -> None:
    gate = SpecGate(PolicySettings(3, controller=OFF), 64)
    choice = gate.choose(seated([0, 31, 32, 63]))
    assert choice.drafts == (3, 3, 0, 0)
    assert (choice.covered, choice.uncovered, choice.reason) == (2, 2, None)
    nine = gate.choose(seated([0, *range(40, 48)]))
    assert nine.drafts == (2, *(0,) * 8)  # the rung of nine sequences, which probes at two


def test_a_high_slot_clamps_the_whole_step_in_snapshot_mode() -> None:
    gate = SpecGate(PolicySettings(3, SNAPSHOT, controller=OFF), 64)
    assert gate.choose(seated([0, 1, 7])).drafts == (3, 3, 3)
    assert gate.choose(seated([0, 1, 8])).drafts == (1, 1, 1)
    # An uncovered slot has no capacity that could clamp.
    assert gate.choose(seated([0, 1, 40])).drafts == (3, 3, 0)
    carry = SpecGate(PolicySettings(3, controller=OFF), 64)
    assert carry.choose(seated([0, 1, 8])).drafts == (3, 3, 3)


def test_what_a_sequence_has_left_cuts_it_alone() -> None:
    gate = SpecGate(PolicySettings(3, controller=OFF), 8)
    candidates = [Candidate(0, 99), Candidate(1, 2), Candidate(2, 0), Candidate(3, -1)]
    assert gate.choose(candidates).drafts == (3, 2, 0, 0)


def test_reasons_for_plain_decoding() -> None:
    def reason(settings: PolicySettings, candidates: list[Candidate]) -> PlainReason | None:
        return SpecGate(settings, 64).choose(candidates).reason

    on = PolicySettings(3, controller=OFF)
    assert reason(PolicySettings(0), seated(1)) is PlainReason.OFF
    assert reason(on, []) is PlainReason.IDLE
    assert reason(on, seated(33)) is PlainReason.TOO_WIDE
    assert reason(PolicySettings(3, mtp_max_seqs_override=0), seated(1)) is PlainReason.TOO_WIDE
    assert reason(on, seated([32, 63])) is PlainReason.UNCOVERED
    assert reason(on, seated(2, room=0)) is PlainReason.NO_ROOM
    assert reason(on, seated(2)) is None


def test_the_controller_switches_off_where_drafts_do_not_pay() -> None:
    gate = SpecGate(PolicySettings(3), 8)
    choice = gate.choose(seated(4))
    assert choice.depth == 3
    for _ in range(200):
        gate.observe(choice, [0] * 4, 1.0 + choice.depth)
        choice = gate.choose(seated(4))
    depths = []
    for _ in range(100):
        gate.observe(choice, [0] * 4, 1.0 + choice.depth)
        choice = gate.choose(seated(4))
        depths.append(choice.depth)
    assert depths.count(0) >= 95
    assert gate.switches == 1
    assert gate.probes == 3


def test_the_reason_of_the_controller() -> None:
    gate = SpecGate(PolicySettings(1), 8)
    choice = gate.choose(seated(1))
    while choice.depth > 0 or gate.switches == 0:
        gate.observe(choice, [0], 1.0 + choice.depth)
        choice = gate.choose(seated(1))
    assert choice.reason is PlainReason.CONTROLLER
    assert choice.engaged


def test_beside_many_prompt_rows_a_full_engine_plain_decodes() -> None:
    gate = SpecGate(PolicySettings(3), 64)
    crowded = gate.choose(seated(6), prompt_rows=64, running=9)
    assert (crowded.drafts, crowded.reason) == ((0,) * 6, PlainReason.PROMPTS)
    assert gate.choose(seated(6), prompt_rows=63, running=9).depth == 3
    assert gate.choose(seated(6), prompt_rows=512, running=8).depth == 3
    alone = SpecGate(PolicySettings(3, controller=OFF), 64)
    assert alone.choose(seated(6), prompt_rows=512, running=64).depth == 3


def test_steps_without_room_say_nothing_of_their_depth() -> None:
    gate = SpecGate(PolicySettings(3), 8)
    for _ in range(100):
        choice = gate.choose(seated(2, room=0))
        assert choice.depth == 3
        gate.observe(choice, [0, 0], 1.0)
    assert gate.probes == 0


def test_engagement_is_told_once_per_change() -> None:
    gate = SpecGate(PolicySettings(3), 128)
    notices = [gate.choose(seated(width)).notice for width in (1, 20, 32, 33, 64, 33, 32, 1)]
    gate.choose([])
    assert notices == [
        "Speculation engaged at 1 sequences, its limit is 32",
        None,
        None,
        "Speculation disengaged at 33 sequences, its limit is 32",
        None,
        None,
        "Speculation engaged at 32 sequences, its limit is 32",
        None,
    ]
    assert (gate.engagements, gate.disengagements) == (2, 1)


@pytest.mark.parametrize(("second", "depth"), [(True, 2), (False, 1)])
def test_recorded_verifies_move_the_rung(second: bool, depth: int) -> None:
    gate = SpecGate(PolicySettings(3, controller=OFF), 32)
    flushes = [
        gate.record(12, 2, 1 + second, now=n / FLUSH_VERIFIES) for n in range(FLUSH_VERIFIES)
    ]
    assert flushes[-1] is not None
    assert gate.choose(seated(12)).depth == depth
    assert gate.probes == 1


SETTINGS = st.builds(
    PolicySettings,
    num_drafts=st.integers(0, 5),
    rollback=st.sampled_from(SsmRollbackMode),
    ladder_text=st.none() | st.sampled_from(["4:4,8:2", "1:1", "16:5", "junk"]),
    ladder_disabled=st.booleans(),
    mtp_max_seqs_override=st.none() | st.integers(0, 64),
    pool_full_width=st.booleans(),
    controller=st.sampled_from(ControllerMode),
)
BATCH = st.dictionaries(st.integers(0, 63), st.integers(-1, 9), max_size=40)


@settings(max_examples=60, deadline=None)
@given(SETTINGS, st.lists(BATCH, max_size=25), st.randoms(use_true_random=False))
def test_no_bound_is_ever_exceeded(
    policy: PolicySettings, steps: list[dict[int, int]], rng: Random
) -> None:
    gate = SpecGate(policy, 64)
    covered = policy.state_slots(64)
    for number, batch in enumerate(steps * 4):
        choice = gate.choose([Candidate(slot, room) for slot, room in batch.items()])
        capacities = [policy.slot_capacity(slot) for slot in batch if slot < covered]
        for (slot, room), drafts in zip(batch.items(), choice.drafts, strict=True):
            assert 0 <= drafts <= max(room, 0)
            assert drafts <= min(policy.num_drafts, *capacities, 99)
            assert drafts == 0 or slot < covered
        if len(batch) > policy.mtp_max_seqs:
            assert not any(choice.drafts)
            assert not choice.engaged
        assert (choice.reason is None) == any(choice.drafts)
        assert choice.covered + choice.uncovered == len(batch)
        accepted = [rng.randint(0, drafts) for drafts in choice.drafts]
        gate.observe(choice, accepted, rng.uniform(0.5, 2.0))
        for drafts, count in zip(choice.drafts, accepted, strict=True):
            gate.record(len(batch), drafts, count, now=float(number))
