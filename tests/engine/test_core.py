"""The engine's step from end to end with the arithmetic model: deltas, errors, drain, counters."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineUnavailableError, InvariantError, QueueFullError, RequestError
from engine.request import FinishReason, GenerationRequest, TokenDelta
from engine.runner import ForwardResult, Segment
from engine.sampling.shaping import TokenMask
from engine.scheduler import MAX_BYPASSES
from tests.engine.fake_model import FakeModel, request

VOCAB = 97
CORE_ARGUMENTS = ("masks", "clock", "eos_ids", "reuse_decoded")


class Engine:
    """A core on a fake model, with every delta kept."""

    def __init__(
        self, *, slots: int = 8, blocks: int = 64, model: Any = None, **extra: Any
    ) -> None:
        self.model = model or FakeModel(slots, blocks, VOCAB)
        core = {k: extra.pop(k) for k in CORE_ARGUMENTS if k in extra}
        config = {"max_prefill_tokens": 128, "max_seq_len": 1000, **extra}
        self.core = EngineCore(
            EngineConfig("none", max_batch_size=slots, **config),
            self.model,
            kv_blocks=blocks,
            **{"eos_ids": frozenset({0}), "keeper": self.model, **core},
        )
        self.deltas: dict[int, list[TokenDelta]] = {}

    def step(self) -> list[TokenDelta]:
        deltas = self.core.step()
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        return deltas

    def finish(self, draft_from: dict[int, list[int]] | None = None, drafts: int = 3) -> None:
        steps = 0
        while self.core.has_work():
            for sequence in self.core.scheduler.decoding() if draft_from else ():
                done = len(sequence.generated)
                guess = list((draft_from or {})[sequence.request_id][done : done + drafts])
                if steps % 3 == 1 and len(guess) > 1:
                    guess[1] = (guess[1] + 1) % VOCAB  # a wrong one in the middle
                self.core.scheduler.propose(sequence.request_id, guess)
            self.step()
            steps += 1
            assert steps < 5000, "livelock"
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.slots_used, stats.kv_blocks_used) == (0,) * 4

    def tokens(self, request_id: int) -> list[int]:
        return [t for d in self.deltas.get(request_id, ()) for t in d.token_ids]

    def last(self, request_id: int) -> TokenDelta:
        return self.deltas[request_id][-1]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [1 + (7 * i + salt) % 90 for i in range(length)]


def generate(*requests: GenerationRequest, **engine: Any) -> Engine:
    result = Engine(**engine)
    for item in requests:
        result.core.add(item)
    result.finish()
    return result


def test_a_request_goes_through_and_says_how_it_ended() -> None:
    engine = generate(request(1, prompt(100), 5, ignore_eos=True))
    assert len(engine.tokens(1)) == 5
    assert [d.finish_reason for d in engine.deltas[1]] == [None] * 4 + [FinishReason.LENGTH]
    assert engine.last(1).stats is not None
    assert all(d.stats is None for d in engine.deltas[1][:-1])
    stats = engine.core.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generation_tokens) == (5, 100, 5)
    assert dict(stats.steps_by_kind) == {"decode": 4, "prefill": 1, "mixed": 0, "verify": 0}
    assert (stats.slots_total, stats.kv_blocks_total, stats.last_step_rows) == (8, 64, 1)
    assert stats.step_seconds_total >= stats.last_step_seconds > 0


def test_a_stop_id_is_reported_and_nothing_follows() -> None:
    reference = generate(request(1, prompt(20), 30, ignore_eos=True)).tokens(1)
    for position in (0, 3, 17):
        stop = reference[position]
        first = reference.index(stop)
        engine = generate(request(1, prompt(20), 30, ignore_eos=True, stop_token_ids=(stop,)))
        assert engine.tokens(1) == reference[: first + 1]
        assert engine.last(1).stop_token_id == stop
        assert engine.last(1).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("concurrency", [2, 8, 32])
def test_tokens_do_not_depend_on_neighbours(concurrency: int) -> None:
    """C04 and C21 alone and in a mixed batch: every control, greedy and seeded."""
    controls: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.2, "seed": 4, "top_p": 0.8, "top_k": 30},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"logit_bias": ((5, 100.0),)},
        {"min_tokens": 10, "ignore_eos": False},
        {"temperature": 0.9, "seed": 8, "min_p": 0.05, "logprobs": 3},
    ]

    def item(i: int) -> GenerationRequest:
        options = {"ignore_eos": True, **controls[i % 8]}
        return request(i, prompt(3 + 29 * (i % 7), i), 12 + i % 5, **options)

    requests = [item(i) for i in range(32)]
    together = generate(*requests, slots=concurrency, blocks=16)
    for one in requests:
        alone = generate(one)
        i = one.request_id
        assert together.tokens(i) == alone.tokens(i)
        assert [d.logprobs for d in together.deltas[i]] == [d.logprobs for d in alone.deltas[i]]
        if i % 8 == 5:
            assert set(alone.tokens(i)) == {5}


@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"logit_bias": ((3, -100.0), (4, 2.0))},
        {"logit_bias": ((9, 100.0),)},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.3},
        {"min_tokens": 10, "ignore_eos": False, "logit_bias": ((0, 100.0),)},
        {"temperature": 0.7, "seed": 9, "top_p": 0.9, "presence_penalty": 1.0},
        {"logprobs": 2},
    ],
)
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_are_invisible_whatever_the_controls(controls: dict[str, Any], drafts: int) -> None:
    """C20 and C21: same ids, log-probabilities and end, in fewer steps."""
    item = request(1, prompt(70), 40, **{"ignore_eos": True, **controls})
    plain = generate(item)
    engine = Engine()
    engine.core.add(item)
    engine.finish({1: plain.tokens(1)}, drafts)
    assert engine.tokens(1) == plain.tokens(1)
    assert [p for d in engine.deltas[1] for p in d.logprobs] == [
        p for d in plain.deltas[1] for p in d.logprobs
    ]
    assert engine.last(1).finish_reason == plain.last(1).finish_reason
    assert engine.core.stats().generation_tokens == plain.core.stats().generation_tokens
    assert engine.core.stats().steps < plain.core.stats().steps
    stats = engine.last(1).stats
    assert stats is not None
    assert 0 < stats.accepted <= stats.drafted
    assert dict(engine.core.stats().steps_by_kind)["verify"] > 0
    if "min_tokens" in controls:
        assert len(plain.tokens(1)) == 11  # ten, then the forced end


def test_a_failed_forward_ends_its_requests_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(slots=2)
    for i in range(3):
        engine.core.add(request(i, prompt(50, i), 5, ignore_eos=True))
    engine.step()
    engine.model.fail_next = RuntimeError("no memory left")
    with caplog.at_level(logging.ERROR):
        deltas = engine.step()
    assert sorted((d.request_id, d.finish_reason) for d in deltas) == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    for delta in deltas:
        assert delta.error == "the model's step failed with RuntimeError; try again"
    assert "A step of 2 rows and 2 sequences failed" in caplog.text
    assert engine.core.stats().running == 0
    engine.finish()
    assert engine.tokens(2) == generate(request(2, prompt(50, 2), 5, ignore_eos=True)).tokens(2)


def test_a_failing_claim_is_a_failed_step() -> None:
    class Broken(FakeModel):
        def claim_slot(self, slot: int) -> None:
            raise ValueError("no slot")

    engine = generate(request(1, prompt(5), 5), model=Broken(8, 64))
    assert engine.last(1).finish_reason is FinishReason.ERROR


def test_a_request_without_finite_logits_ends_alone() -> None:
    class Poisoned(FakeModel):
        def forward(self, segments: Sequence[Segment]) -> ForwardResult:
            result = super().forward(segments)
            for row, segment in enumerate(segments):
                if segment.start == 12:
                    result.logits[row] = torch.nan
            return result

    items = [request(i, prompt(10 * i, i), 6, ignore_eos=True) for i in (1, 2)]
    engine = generate(*items, model=Poisoned(8, 64))
    assert engine.last(1).finish_reason is FinishReason.ERROR
    assert engine.last(1).error == "the model produced no finite logits for this request"
    assert len(engine.tokens(1)) == 3
    assert engine.tokens(2) == generate(items[1]).tokens(2)


def test_abort_ends_with_one_last_delta_and_frees_at_once() -> None:
    engine = Engine(slots=1)
    for i in (1, 2):
        engine.core.add(request(i, prompt(10, i), 50, ignore_eos=True))
    engine.step()
    for i in (1, 2):
        engine.core.abort(i)
        engine.core.abort(i)
    engine.core.abort(77)
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert engine.core.has_work()
    deltas = engine.step()
    assert [(d.request_id, d.finish_reason) for d in deltas] == [
        (1, FinishReason.ABORT),
        (2, FinishReason.ABORT),
    ]
    assert not engine.core.has_work()
    assert engine.core.stats().steps == 1


def test_a_leak_is_noticed_when_the_engine_falls_idle() -> None:
    engine = Engine()
    engine.core.add(request(1, prompt(4), 2))
    assert engine.core.scheduler.holdings.blocks.allocate(1) is not None
    with pytest.raises(InvariantError, match="0 slots, 1 KV blocks"):
        engine.finish()


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    engine = Engine(slots=1)
    for i in (1, 2):
        engine.core.add(request(i, prompt(10, i), 5, ignore_eos=True))
    engine.step()
    engine.core.drain()
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        engine.core.add(request(3, prompt(3), 1))
    engine.finish()
    assert len(engine.tokens(1)) == len(engine.tokens(2)) == 5


def test_abort_all_ends_what_a_drain_left() -> None:
    engine = Engine(slots=1)
    for i in (1, 2):
        engine.core.add(request(i, prompt(10, i), 500, ignore_eos=True))
    engine.step()
    engine.core.drain()
    engine.core.abort_all()
    engine.finish()
    assert [engine.last(i).finish_reason for i in (1, 2)] == [FinishReason.ABORT] * 2


def test_deadlines_run_while_others_decode() -> None:
    now = 0.0
    engine = Engine(slots=1, clock=lambda: now)
    engine.core.add(request(1, prompt(10), 50, ignore_eos=True))
    engine.core.add(request(2, prompt(10), 50, deadline=3.0))
    engine.step()
    now = 4.0
    engine.step()
    assert engine.last(2).finish_reason is FinishReason.ERROR
    assert engine.last(2).error_status == 503


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": ((97, 1.0),)}, "logit_bias has token id 97 and the vocabulary has 97"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids has token id -1"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any], message: str) -> None:
    engine = Engine()
    with pytest.raises(RequestError, match=message):
        engine.core.add(request(1, prompt(4), 1, **options))
    with pytest.raises(RequestError, match="prompt has token id 200"):
        engine.core.add(request(1, [3, 200], 1))
    assert not engine.core.has_work()


def with_grammar(request_id: int, grammar: str, max_tokens: int, **options: Any) -> Any:
    plain = request(request_id, prompt(10, request_id), max_tokens, **options)
    return GenerationRequest(request_id, plain.prompt_ids, plain.sampling, grammar=grammar)


class EvenOdd:
    """A grammar that alternates even and odd ids and ends after six tokens.

    `slow` ones are held until the test puts them into `news`; `broken` ones raise.
    """

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.broken: dict[int, Exception] = {}
        self.news: list[tuple[int, RequestError | None]] = []
        self.waits = 0

    def open(self, request: GenerationRequest) -> bool:
        if request.grammar == "bad":
            raise RequestError("the grammar is bad")
        self.opened.append(request.request_id)
        if request.grammar == "broken":
            self.broken[request.request_id] = ValueError("broken")
        if request.grammar == "ambiguous":
            self.broken[request.request_id] = RequestError("too slow", param="p")
        return request.grammar != "slow"

    def settled(self) -> list[tuple[int, RequestError | None]]:
        news, self.news = self.news, []
        return news

    def wait(self, seconds: float) -> None:
        assert seconds < 0.1
        self.waits += 1

    def allowed(self, request_id: int, output: Sequence[int]) -> TokenMask | None:
        if request_id in self.broken:
            raise self.broken[request_id]
        mask = np.zeros(VOCAB, np.bool_)
        if len(output) == 6:
            mask[0] = True
        else:
            mask[2 - len(output) % 2 :: 2] = True
        return mask

    def close(self, request_id: int) -> None:
        self.opened.remove(request_id)


def test_a_grammar_constrains_every_row_of_a_burst() -> None:
    masks = EvenOdd()
    plain = generate(
        with_grammar(1, "g", 20), request(2, prompt(10), 8, ignore_eos=True), masks=masks
    )
    tokens = plain.tokens(1)
    assert [t % 2 for t in tokens] == [0, 1, 0, 1, 0, 1, 0]
    assert tokens[-1] == 0
    assert plain.last(1).finish_reason is FinishReason.STOP
    engine = Engine(masks=masks)
    engine.core.add(with_grammar(1, "g", 20))
    engine.finish({1: tokens})
    assert engine.tokens(1) == tokens
    assert masks.opened == []


def test_a_grammar_is_refused_where_none_can_be_used() -> None:
    with pytest.raises(RequestError, match="cannot constrain output"):
        Engine().core.add(with_grammar(1, "g", 5))
    masks = EvenOdd()
    engine = Engine(masks=masks, max_waiting=1)
    with pytest.raises(RequestError, match="bad"):
        engine.core.add(with_grammar(1, "bad", 5))
    engine.core.add(with_grammar(2, "g", 5))
    with pytest.raises(QueueFullError):
        engine.core.add(with_grammar(3, "g", 5))
    assert masks.opened == [2]
    engine.core.abort(2)
    engine.finish()
    assert masks.opened == []


def test_a_held_request_waits_for_its_grammar_and_nobody_waits_for_it() -> None:
    masks = EvenOdd()
    engine = Engine(masks=masks, slots=2)
    engine.core.add(with_grammar(1, "slow", 20))
    for _ in range(3):
        assert engine.core.step() == []
    assert masks.waits == 3
    assert (engine.core.stats().held, engine.core.stats().waiting) == (1, 1)
    assert engine.core.stats().steps == 0
    engine.core.add(request(2, prompt(10), 4, ignore_eos=True))
    while engine.core.has_work() and not engine.deltas.get(2, [])[3:]:
        engine.step()
    assert engine.last(2).finish_reason is FinishReason.LENGTH
    assert masks.waits == 3, "nobody sleeps while there is something to do"
    masks.news.append((1, None))
    engine.finish()
    assert [t % 2 for t in engine.tokens(1)] == [0, 1, 0, 1, 0, 1, 0]
    assert masks.opened == []


@pytest.mark.parametrize("end", ["refuse", "abort", "expire"])
def test_a_held_request_can_end_in_the_queue(end: str) -> None:
    now = 0.0
    masks = EvenOdd()
    engine = Engine(masks=masks, slots=1, clock=lambda: now)
    engine.core.add(replace(with_grammar(1, "slow", 20), deadline=3.0))
    engine.step()
    if end == "refuse":
        masks.news.append((1, RequestError("too deep", param="p", code="c")))
    elif end == "abort":
        engine.core.abort(1)
    now = 4.0 if end == "expire" else 0.0
    engine.step()
    last = engine.last(1)
    assert last.finish_reason is (FinishReason.ABORT if end == "abort" else FinishReason.ERROR)
    if end == "refuse":
        assert (last.error, last.error_status) == ("too deep", 400)
        assert (last.error_param, last.error_code) == ("p", "c")
    assert masks.opened == []
    assert not engine.core.has_work()
    masks.news += [(1, None), (1, RequestError("late"))]
    engine.core.add(request(2, prompt(10), 2, ignore_eos=True))
    engine.finish()
    assert len(engine.tokens(2)) == 2


def test_a_grammar_that_raises_ends_its_own_request_only() -> None:
    engine = Engine(masks=EvenOdd())
    engine.core.add(with_grammar(1, "broken", 5))
    engine.core.add(with_grammar(4, "ambiguous", 5))
    engine.core.add(with_grammar(2, "g", 20))
    engine.core.add(request(3, prompt(10), 4, ignore_eos=True))
    engine.finish()
    assert engine.last(1).finish_reason is FinishReason.ERROR
    assert engine.last(1).error == "the grammar of this request failed; try again"
    assert engine.last(1).error_status == 500
    assert (engine.last(4).error, engine.last(4).error_status) == ("too slow", 400)
    assert engine.last(4).error_param == "p"
    assert engine.last(2).finish_reason is FinishReason.STOP
    assert engine.last(3).finish_reason is FinishReason.LENGTH


def test_every_request_of_a_mixed_load_is_served_within_a_bound() -> None:
    """C17: small and large requests on a small pool; no wait exceeds the work before it."""
    engine = Engine(slots=4, blocks=12, max_prefill_tokens=128)
    first_token: dict[int, int] = {}
    for i in range(60):
        length = 600 if i % 15 == 0 else 32
        engine.core.add(request(i, prompt(length, i), 4, ignore_eos=True))
    steps = 0
    while engine.core.has_work():
        for delta in engine.step():
            first_token.setdefault(delta.request_id, steps)
        steps += 1
    # A large prompt takes five steps and a small request four at four at a time; the large ones
    # come after those before them in the queue and at most MAX_BYPASSES of those behind.
    for i in range(60):
        large_before = i // 15 + 1
        small_before = i + MAX_BYPASSES
        assert first_token[i] <= 10 * large_before + 5 * small_before
