"""Drafts in a plan and bursts in a commit: cuts, counts and block limits (C20)."""

import pytest

from engine.errors import InvariantError
from engine.request import FinishReason, TokenLogprobs
from engine.runner import RowPhase
from engine.scheduler import StepKind, StepOutcome
from tests.engine.fake_model import request
from tests.engine.test_scheduler_rules import Rig, alone, prompt


def rig_with_drafts(drafts: tuple[int, ...], **sampling: object) -> Rig:
    """A rig whose request 1 (prompt of 10, one token emitted) has drafts for its next step."""
    rig = Rig()
    rig.add(request(1, prompt(10), 20, **sampling))  # type: ignore[arg-type]
    rig.step()
    rig.scheduler.propose(1, drafts)
    return rig


def test_drafts_follow_the_last_token_and_each_row_is_sampled() -> None:
    rig = rig_with_drafts((5, 6, 7), ignore_eos=True)
    plan = rig.scheduler.plan()
    (segment,) = plan.segments
    assert plan.kind is StepKind.VERIFY
    assert (segment.phase, segment.start, segment.committed) == (RowPhase.DECODE, 10, 1)
    assert segment.token_ids == (rig.tokens[1][0], 5, 6, 7)
    assert segment.logit_rows == 4
    assert [(row.position, row.drafts) for row in plan.sampling_rows] == [
        (1, ()),
        (2, (5,)),
        (3, (5, 6)),
        (4, (5, 6, 7)),
    ]


@pytest.mark.parametrize("accepted", range(4))
def test_a_burst_of_any_length_is_emitted_and_counted(accepted: int) -> None:
    rig = rig_with_drafts((5, 6, 7), ignore_eos=True)
    plan = rig.scheduler.plan()
    burst = [5, 6, 7, 8][: accepted + 1]
    (delta,) = rig.scheduler.commit(plan, StepOutcome([burst]))
    (sequence,) = plan.sequences
    assert delta.token_ids == tuple(burst)
    assert sequence.computed == 11 + accepted
    assert sequence.drafts == ()
    stats = sequence.stats()
    assert (stats.drafted, stats.accepted) == (3, accepted)
    assert stats.drafted_per_position == (1, 1, 1)
    assert stats.accepted_per_position == tuple(int(i < accepted) for i in range(3))
    assert rig.scheduler.plan().segments[0].start == 11 + accepted


@pytest.mark.parametrize("offset", range(4))
def test_a_stop_id_cuts_the_burst_behind_it(offset: int) -> None:
    burst = [5, 6, 7, 8]
    rig = rig_with_drafts((5, 6, 7), ignore_eos=True, stop_token_ids=(burst[offset],), logprobs=0)
    plan = rig.scheduler.plan()
    logprobs = [TokenLogprobs(-float(i)) for i in range(4)]
    (delta,) = rig.scheduler.commit(plan, StepOutcome([burst], [logprobs]))
    assert delta.token_ids == tuple(burst[: offset + 1])
    assert delta.logprobs == tuple(logprobs[: offset + 1])
    assert (delta.finish_reason, delta.stop_token_id) == (FinishReason.STOP, burst[offset])
    assert delta.stats is not None
    assert (delta.stats.drafted, delta.stats.accepted) == (3, offset)
    assert rig.scheduler.generation_tokens == 1 + offset + 1
    assert rig.scheduler.holdings.blocks.used == 0


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_max_tokens_bounds_drafts_and_cuts_the_burst(room: int) -> None:
    rig = Rig()
    rig.add(request(1, prompt(10), 1 + room, ignore_eos=True))
    rig.step()
    rig.scheduler.propose(1, (5, 6, 7))
    plan = rig.scheduler.plan()
    assert plan.segments[0].token_ids[1:] == (5, 6, 7)[: room - 1]
    (delta,) = rig.scheduler.commit(plan, StepOutcome([[5, 6, 7, 8][:room]]))
    assert len(delta.token_ids) == room
    assert delta.finish_reason is FinishReason.LENGTH


def test_the_end_id_wins_over_the_length_and_is_ignored_on_request() -> None:
    for ignore in (False, True):
        rig = Rig()
        rig.add(request(1, prompt(10), 3, ignore_eos=ignore))
        rig.commit(rig.scheduler.plan(), StepOutcome([[9]]))
        rig.scheduler.propose(1, (0,))
        (delta,) = rig.commit(rig.scheduler.plan(), StepOutcome([[5, 0]]))
        assert delta.token_ids == (5, 0)
        expected = (FinishReason.LENGTH, None) if ignore else (FinishReason.STOP, 0)
        assert (delta.finish_reason, delta.stop_token_id) == expected


def test_an_outcome_that_does_not_match_its_rows_is_a_bug() -> None:
    for tokens in ([], [5, 6, 7, 8, 9]):
        rig = rig_with_drafts((5, 6, 7), ignore_eos=True)
        plan = rig.scheduler.plan()
        with pytest.raises(InvariantError, match="decode rows"):
            rig.scheduler.commit(plan, StepOutcome([tokens]))


def test_drafts_go_before_anybody_is_preempted() -> None:
    rig = Rig(slots=2, blocks=4, max_prefill_tokens=256)
    for i in range(2):
        rig.add(request(i, prompt(63, i), 60, ignore_eos=True))
    rig.step()
    assert rig.scheduler.holdings.blocks.free_count == 2
    rig.step()  # the 64th token fits the first block
    rig.step()  # the 65th takes a second one each
    assert rig.scheduler.holdings.blocks.free_count == 0
    rig.add(request(2, prompt(5), 1))
    for sequence in rig.scheduler.decoding():
        sequence.drafts = tuple(range(1, 100))
    plan = rig.scheduler.plan()
    assert rig.scheduler.preemptions == 0
    for segment in plan.segments:
        assert segment.start + len(segment.token_ids) == 2 * 64


def test_right_and_wrong_drafts_leave_the_tokens_as_they_are() -> None:
    reference = alone(70, 40)
    rig = Rig()
    sequence = rig.add(request(1, prompt(70), 40, ignore_eos=True))
    steps = 0
    while rig.scheduler.has_work():
        if sequence.generated:
            done = len(sequence.generated)
            right = reference[done : done + steps % 4]
            rig.scheduler.propose(1, [*right, 1, 2][: 1 + steps % 5])
        rig.step()
        steps += 1
    assert rig.tokens[1] == reference
    assert steps < 30
    assert sequence.stats().accepted > 10
