"""Each rule of the scheduler on single steps, with the arithmetic model."""

import pytest

from engine.config import GRID, EngineConfig
from engine.errors import ConfigError, InvariantError, QueueFullError, RequestError
from engine.request import FinishReason, TokenDelta
from engine.runner import RowPhase
from engine.scheduler import MAX_BYPASSES, Phase, Scheduler, StepKind, StepOutcome, StepPlan
from tests.engine.fake_model import FakeModel, request


class Rig:
    """A scheduler, a fake model and a clock that tests turn by hand."""

    def __init__(self, *, slots: int = 4, blocks: int = 64, **config: object) -> None:
        self.now = 0.0
        self.model = FakeModel(slots, blocks)
        settings: dict[str, object] = {"max_prefill_tokens": 128, **config}
        self.scheduler = Scheduler(
            EngineConfig("none", max_batch_size=slots, **settings),  # type: ignore[arg-type]
            kv_blocks=blocks,
            move_slot=self.model.move_slot,
            eos_ids=frozenset({0}),
            clock=lambda: self.now,
        )
        self.add = self.scheduler.add
        self.tokens: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepOutcome:
        """Greedy targets, with the accepted part of each burst."""
        for slot in plan.claims:
            self.model.claim_slot(slot)
        result = self.model.forward(plan.segments)
        targets = result.logits.argmax(-1).tolist()
        tokens: list[list[int]] = []
        for segment in plan.segments:
            mine, targets = targets[: segment.logit_rows], targets[segment.logit_rows :]
            kept = mine[:1]
            for draft, target in zip(segment.token_ids[1:], mine[1:], strict=False):
                if segment.phase is not RowPhase.DECODE or draft != kept[-1]:
                    break
                kept.append(target)
            tokens.append(kept)
        return StepOutcome(tokens)

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[TokenDelta]:
        deltas = self.scheduler.commit(plan, outcome)
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        self.scheduler.check()
        return deltas

    def step(self) -> tuple[StepPlan, list[TokenDelta]]:
        plan = self.scheduler.plan()
        return plan, self.commit(plan, self.run(plan))

    def finish(self, limit: int = 2000) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work():
            plans.append(self.step()[0])
            assert len(plans) < limit, "livelock"
        assert self.scheduler.holdings.slots.used == 0
        assert self.scheduler.holdings.blocks.used == 0
        return plans


def prompt(length: int, salt: int = 0) -> list[int]:
    return [1 + (7 * i + salt) % 90 for i in range(length)]


def alone(length: int, max_tokens: int, salt: int = 0, **config: object) -> list[int]:
    """The tokens of a request that has the engine to itself; ignores the end id."""
    rig = Rig(**config)  # type: ignore[arg-type]
    rig.add(request(1, prompt(length, salt), max_tokens, ignore_eos=True))
    rig.finish()
    return rig.tokens[1]


def ids(plan: StepPlan) -> list[int]:
    return [s.request_id for s in plan.sequences]


def test_a_prompt_runs_in_chunks_that_end_on_the_grid() -> None:
    rig = Rig()
    rig.add(request(1, prompt(300), 3, ignore_eos=True))
    plans = rig.finish()
    shape = [
        (s.phase, s.start, len(s.token_ids), s.logit_rows) for plan in plans for s in plan.segments
    ]
    assert shape == [
        (RowPhase.PREFILL, 0, 128, 0),
        (RowPhase.PREFILL, 128, 128, 0),
        (RowPhase.PREFILL, 256, 44, 1),
        (RowPhase.DECODE, 300, 1, 1),
        (RowPhase.DECODE, 301, 1, 1),
    ]
    assert [p.segments[0].next_token for p in plans[:3]] == [*(prompt(300)[128:257:128]), None]
    assert [p.kind for p in plans] == [StepKind.PREFILL] * 3 + [StepKind.DECODE] * 2
    assert [p.claims for p in plans] == [(0,), (), (), (), ()]
    assert rig.scheduler.prompt_tokens == 300
    assert rig.scheduler.generation_tokens == 3


def test_several_prompts_share_a_step_first_come_first_served() -> None:
    rig = Rig(max_prefill_tokens=256)
    for i, length in enumerate((30, 100, 200)):
        rig.add(request(i, prompt(length, i), 2, ignore_eos=True))
    plan, _ = rig.step()
    # 30 + 100 leave 126 rows, of which the last prompt takes one grid's worth.
    assert [(s.start, len(s.token_ids)) for s in plan.segments] == [(0, 30), (0, 100), (0, 64)]
    plan, _ = rig.step()
    assert plan.kind is StepKind.MIXED
    assert [len(s.token_ids) for s in plan.segments] == [1, 1, 136]


def test_every_decode_has_its_row_in_every_step_and_prompts_get_on() -> None:
    """C17: under a flood of long prompts the running stream gets a token in each step."""
    rig = Rig(slots=4, blocks=200, max_prefill_tokens=128)
    rig.add(request(0, prompt(10), 60, ignore_eos=True))
    rig.step()
    arrivals, done = 1, set()
    for step in range(59):
        if step % 3 == 0:
            rig.add(request(arrivals, prompt(500, arrivals), 2, ignore_eos=True))
            arrivals += 1
        plan, deltas = rig.step()
        assert plan.segments[0].phase is RowPhase.DECODE
        assert 0 in ids(plan)
        prompt_rows = sum(len(s.token_ids) for s in plan.segments if s.phase is RowPhase.PREFILL)
        assert prompt_rows <= 128
        done |= {d.request_id for d in deltas if d.finish_reason}
    # Four steps of prompt and one of decode each: the flood itself is served all along.
    assert len(done) >= 12
    assert 0 in done


def test_a_long_prompt_is_not_starved_by_32_decodes() -> None:
    rig = Rig(slots=33, blocks=400, max_prefill_tokens=64)
    for i in range(32):
        rig.add(request(i, prompt(5, i), 200, ignore_eos=True))
    while any(s.phase is not Phase.DECODE for s in rig.scheduler.holdings.running()) or len(
        rig.scheduler.waiting
    ):
        rig.step()
    rig.add(request(99, prompt(640), 1, ignore_eos=True))
    for _ in range(10):
        plan, deltas = rig.step()
        assert len(plan.segments) == 33
    assert [d.request_id for d in deltas if d.finish_reason] == [99]


def test_priority_then_arrival_is_the_order_of_admission() -> None:
    rig = Rig(slots=1)
    for i, priority in enumerate((5, 0, 5, -1)):
        rig.add(request(i, prompt(4, i), 1, priority=priority))
    order = [d.request_id for plan in range(4) for d in rig.step()[1]]
    assert order == [3, 1, 0, 2]


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    rig = Rig(slots=1, max_waiting=2)
    for i in range(2):
        rig.add(request(i, prompt(4), 50, ignore_eos=True))
    with pytest.raises(QueueFullError, match="2 requests are waiting and the limit is 2") as error:
        rig.add(request(2, prompt(4), 1))
    assert error.value.retry_after == 1
    rig.now = 100.0
    rig.step()
    rig.add(request(3, prompt(4), 1))
    with pytest.raises(QueueFullError) as error:
        rig.add(request(4, prompt(4), 1))
    assert error.value.retry_after == 20


def test_a_request_that_waits_past_its_deadline_is_given_up() -> None:
    rig = Rig(slots=1)
    rig.add(request(0, prompt(4), 50, deadline=1.0, ignore_eos=True))
    rig.step()
    rig.add(request(1, prompt(4), 5, deadline=2.0))
    rig.now = 1.9
    assert rig.scheduler.expire() == []
    rig.now = 2.5
    (delta,) = rig.scheduler.expire()
    assert (delta.request_id, delta.finish_reason) == (1, FinishReason.ERROR)
    assert delta.error_status == 503
    assert delta.error is not None
    assert "2 s" in delta.error
    assert delta.stats is not None
    assert delta.stats.queue_seconds == 2.5
    rig.finish()
    assert len(rig.tokens[0]) == 50  # admitted in time, so its deadline is over


def test_requests_that_can_never_run_are_refused_at_once() -> None:
    rig = Rig(blocks=4, max_seq_len=1000)
    with pytest.raises(RequestError, match=r"need 258 tokens .* holds 256"):
        rig.add(request(1, prompt(200), 58))
    with pytest.raises(RequestError, match="1000 tokens and the context length is 1000"):
        rig.add(request(1, prompt(1000), 1))
    with pytest.raises(RequestError, match="prompt is empty"):
        rig.add(request(1, [], 1))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        rig.add(request(1, prompt(3), 0))
    rig.add(request(1, prompt(200), 57, ignore_eos=True))
    with pytest.raises(InvariantError, match="request id 1 is in use"):
        rig.add(request(1, prompt(3), 1))
    rig.finish()
    assert len(rig.tokens[1]) == 57


def test_what_can_never_run_is_not_asked_to_come_back_later() -> None:
    """A full queue refuses with a time to retry, which would not help these."""
    rig = Rig(slots=1, blocks=4, max_seq_len=1000, max_waiting=1)
    rig.add(request(1, prompt(4), 5))
    with pytest.raises(RequestError, match=r"need 258 tokens .* holds 256") as error:
        rig.add(request(2, prompt(200), 58))
    assert not isinstance(error.value, QueueFullError)
    with pytest.raises(QueueFullError):
        rig.add(request(2, prompt(200), 57))


def test_the_context_length_ends_a_sequence() -> None:
    rig = Rig(max_seq_len=20)
    rig.add(request(1, prompt(19), 100, ignore_eos=True))
    rig.add(request(2, prompt(10), 100, ignore_eos=True))
    rig.finish()
    assert (len(rig.tokens[1]), len(rig.tokens[2])) == (1, 10)


def test_small_requests_pass_a_large_one_a_bounded_number_of_times() -> None:
    """C17: the head of the queue needs most of the pool while small ones stream in behind it."""
    rig = Rig(slots=4, blocks=10, max_prefill_tokens=1024)
    rig.add(request(0, prompt(100), 29, ignore_eos=True))  # keeps 2 or 3 blocks for 29 steps
    rig.step()
    rig.add(request(1, prompt(9 * GRID - 5), 2, ignore_eos=True))
    passed: list[int] = []
    for i in range(2, 40):
        rig.add(request(i, prompt(10, i), 1, ignore_eos=True))
    while rig.scheduler.has_work():
        plan, _ = rig.step()
        admitted = [s.request_id for s in plan.sequences if s.slot is not None or s.generated]
        passed += [i for i in admitted if i >= 2 and 1 not in rig.tokens]
        assert len(plan.sequences) > 0
    assert len(passed) == MAX_BYPASSES
    assert len(rig.tokens) == 40


def test_decode_that_runs_out_of_blocks_preempts_the_youngest() -> None:
    rig = Rig(slots=3, blocks=6, max_prefill_tokens=512)
    for i in range(3):
        rig.add(request(i, prompt(60, i), 100, ignore_eos=True))
    plans = rig.finish()
    assert rig.scheduler.preemptions > 0
    preempted = {s.request_id for plan in plans for s in plan.sequences if s.preemptions}
    assert 0 not in preempted
    for i in range(3):
        assert rig.tokens[i] == alone(60, 100, i)
    # The first in order had a row in every step until it ended.
    first = [plan for plan in plans if 0 in ids(plan)]
    assert len(first) == 100
    assert plans[:100] == first


def test_a_preempted_sequence_prefills_its_prompt_and_replays_its_tokens() -> None:
    rig = Rig(slots=2, blocks=8, max_prefill_tokens=64)
    sequence = rig.add(request(1, prompt(100), 90, ignore_eos=True))
    for _ in range(2 + 80):
        rig.step()
    generated = list(sequence.generated)
    assert len(generated) == 81
    rig.scheduler.preempt(sequence)
    rig.scheduler.check()
    assert rig.scheduler.holdings.blocks.used == 0
    plans = [rig.step()[0] for _ in range(5)]
    (segments) = [plan.segments[0] for plan in plans]
    assert [(s.phase, s.start, len(s.token_ids), s.logit_rows) for s in segments] == [
        (RowPhase.PREFILL, 0, 64, 0),
        (RowPhase.PREFILL, 64, 36, 0),
        (RowPhase.REPLAY, 100, 64, 0),
        (RowPhase.REPLAY, 164, 16, 0),
        (RowPhase.DECODE, 180, 1, 1),
    ]
    assert segments[1].next_token == generated[0]
    assert segments[2].token_ids == tuple(generated[:64])
    assert segments[3].next_token == generated[80]
    assert segments[4].token_ids == (generated[80],)
    rig.finish()
    assert rig.tokens[1] == alone(100, 90)
    assert sequence.stats().preemptions == 1
    assert rig.scheduler.prompt_tokens == 100


@pytest.mark.parametrize("after", range(1, 8))
def test_preemption_at_any_step_changes_no_token(after: int) -> None:
    rig = Rig(slots=2, blocks=8, max_prefill_tokens=64)
    sequence = rig.add(request(1, prompt(130), 9, ignore_eos=True))
    for _ in range(after):
        rig.step()
    rig.scheduler.preempt(sequence)
    rig.finish()
    assert rig.tokens[1] == alone(130, 9)
    assert rig.scheduler.generation_tokens == 9
    assert rig.scheduler.prompt_tokens == 130


def test_a_request_as_large_as_the_pool_is_served_and_resumed() -> None:
    rig = Rig(slots=2, blocks=4, max_prefill_tokens=256)
    large = rig.add(request(1, prompt(250), 7, ignore_eos=True))
    for _ in range(3):
        rig.step()
    rig.scheduler.preempt(large)
    rig.finish()
    assert rig.tokens[1] == alone(250, 7)


def test_the_needy_is_preempted_itself_when_it_is_the_youngest() -> None:
    rig = Rig(slots=2, blocks=5, max_prefill_tokens=512)
    old = rig.add(request(0, prompt(120), 60, ignore_eos=True))
    young = rig.add(request(1, prompt(100), 40, ignore_eos=True))
    for _ in range(30):
        rig.step()
    # The old one took the fifth block and needs no more: the young one's own third is missing.
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert young.phase is Phase.WAITING
    rig.finish()
    assert rig.tokens[0] == alone(120, 60)
    assert rig.tokens[1] == alone(100, 40)


def test_retirement_moves_the_highest_survivors_down() -> None:
    rig = Rig(slots=6, blocks=30, max_prefill_tokens=512)
    lengths = [2, 9, 2, 9, 9, 2]
    for i, length in enumerate(lengths):
        rig.add(request(i, prompt(8, i), length, ignore_eos=True))
    rig.step()
    moves: list[tuple[int, int]] = []

    def record(src: int, dst: int) -> None:
        moves.append((src, dst))
        rig.model.move_slot(src, dst)

    rig.scheduler.holdings._move_slot = record
    rig.step()
    assert {s.slot: s.request_id for s in rig.scheduler.holdings.running()} == {0: 4, 1: 1, 2: 3}
    assert moves == [(4, 0), (3, 2)]
    rig.finish()
    for i, length in enumerate(lengths):
        assert rig.tokens[i] == alone(8, length, i)


def test_without_compaction_survivors_keep_their_slots() -> None:
    rig = Rig(slots=3, blocks=30, slot_compaction=False)
    for i, length in enumerate((2, 2, 6)):
        rig.add(request(i, prompt(8, i), length, ignore_eos=True))
    rig.step()
    rig.step()
    assert [s.slot for s in rig.scheduler.holdings.running()] == [2]
    rig.add(request(3, prompt(8, 3), 2))
    plan, _ = rig.step()
    assert plan.claims == (0,)


def test_abort_frees_a_request_in_every_state() -> None:
    rig = Rig(slots=2, blocks=8, max_prefill_tokens=64)
    waiting = rig.add(request(0, prompt(10), 5))
    assert rig.scheduler.abort(0) == TokenDelta(
        0, finish_reason=FinishReason.ABORT, stats=waiting.stats()
    )
    assert not rig.scheduler.has_work()
    for state in (Phase.PREFILL, Phase.REPLAY, Phase.DECODE):
        sequence = rig.add(request(1, prompt(100), 90, ignore_eos=True))
        if state is Phase.REPLAY:
            for _ in range(82):
                rig.step()
            rig.scheduler.preempt(sequence)
        while sequence.phase is not state:
            rig.step()
        delta = rig.scheduler.abort(1)
        assert delta is not None
        assert delta.finish_reason is FinishReason.ABORT
        assert sequence.finish_reason is FinishReason.ABORT
        rig.scheduler.check()
        assert rig.scheduler.holdings.slots.used == 0
        assert rig.scheduler.holdings.blocks.used == 0
    assert rig.scheduler.abort(1) is None
    assert rig.scheduler.abort(12345) is None


def test_abort_between_plan_and_commit_takes_effect_at_the_commit() -> None:
    rig = Rig(slots=3, blocks=12, max_prefill_tokens=256)
    for i in range(3):
        rig.add(request(i, prompt(10, i), 5, ignore_eos=True))
    rig.step()
    rig.add(request(3, prompt(10), 5))
    plan = rig.scheduler.plan()
    for request_id in (0, 3):
        assert rig.scheduler.abort(request_id) is None
        assert rig.scheduler.abort(request_id) is None
    deltas = rig.commit(plan, rig.run(plan))
    assert [(d.request_id, d.finish_reason) for d in deltas] == [
        (1, None),
        (2, None),
        (0, FinishReason.ABORT),
        (3, FinishReason.ABORT),
    ]
    assert all(not d.token_ids for d in deltas[2:])
    assert [s.slot for s in rig.scheduler.holdings.running()] == [0, 1]
    rig.finish()
    assert rig.tokens[1] == alone(10, 5, 1)
    assert rig.tokens[2] == alone(10, 5, 2)


def test_a_failed_step_ends_its_sequences_and_only_those() -> None:
    rig = Rig(slots=3, blocks=12, max_prefill_tokens=64)
    rig.add(request(0, prompt(10), 5, ignore_eos=True))
    rig.step()
    rig.add(request(1, prompt(64, 1), 5, ignore_eos=True))
    rig.add(request(2, prompt(64, 2), 5, ignore_eos=True))
    plan = rig.scheduler.plan()
    deltas = rig.scheduler.fail(plan, "the step failed")
    assert [(d.request_id, d.finish_reason, d.error) for d in deltas] == [
        (0, FinishReason.ERROR, "the step failed"),
        (1, FinishReason.ERROR, "the step failed"),
    ]
    rig.scheduler.check()
    rig.finish()
    assert rig.tokens[2] == alone(64, 5, 2)


def test_plan_and_commit_come_in_turn() -> None:
    rig = Rig()
    sequence = rig.add(request(0, prompt(10), 5))
    plan = rig.scheduler.plan()
    with pytest.raises(InvariantError, match="a step is in flight"):
        rig.scheduler.plan()
    with pytest.raises(InvariantError, match="while a step runs"):
        rig.scheduler.preempt(sequence)
    rig.commit(plan, rig.run(plan))
    with pytest.raises(InvariantError, match="not in flight"):
        rig.scheduler.commit(plan, StepOutcome([[1]]))


@pytest.mark.parametrize("tokens", [0, 63, 100])
def test_the_prefill_budget_must_lie_on_the_grid(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"is {tokens} and must be a multiple of 64"):
        Rig(max_prefill_tokens=tokens)
