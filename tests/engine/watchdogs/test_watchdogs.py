"""Watchdogs over an arithmetic model whose every token depends on state and KV of all before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from engine.errors import RequestError
from engine.request import FinishReason, GenerationRequest
from engine.runner import RowPhase, Segment
from engine.sampling.shaping import TokenMask
from tests.engine.watchdogs.loopy import CYCLE, VOCAB, LoopyModel, Watched, ask

PROMPT = [1 + 7 * i % 90 for i in range(70)]


def unwatched(item: GenerationRequest) -> list[int]:
    return Watched(watch=False).run(item).tokens[item.request_id]


def longest_loop(tokens: Sequence[int]) -> int:
    """Most tokens in a row that equal the one a cycle before."""
    best = run = 0
    for before, after in zip(tokens, tokens[len(CYCLE) :], strict=False):
        run = run + 1 if before == after else 0
        best = max(best, run)
    return best


def test_the_model_loops_when_nobody_watches() -> None:
    tokens = unwatched(ask(1, PROMPT))
    assert longest_loop(tokens) > 300


def test_an_answer_is_steered_back_and_its_start_stays() -> None:
    engine = Watched().run(ask(1, PROMPT))
    plain, tokens = unwatched(ask(1, PROMPT)), engine.tokens[1]
    stats = engine.core.stats().watchdogs
    assert stats is not None
    assert (stats.ring_slots, stats.rollbacks) == (8, 3)
    assert dict(stats.detections) == {"loop": 4, "repetition": 0}
    assert dict(stats.stops) == {"sent": 0, "exhausted": 1, "unreachable": 0}
    last = engine.last[1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, None)
    assert last.stats is not None
    assert (last.stats.rollbacks, last.stats.retracted) == (3, stats.retracted)
    loop = next(i for i, token in enumerate(plain) if token in CYCLE)
    same = next(i for i, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b)
    assert same >= loop
    assert longest_loop(tokens[:-64]) < 24
    assert engine.core.stats().generation_tokens == len(tokens) + stats.retracted


def test_a_stream_is_stopped_and_nothing_of_it_is_taken_back() -> None:
    engine = Watched().run(ask(1, PROMPT, whole=False))
    tokens = engine.tokens[1]
    assert tokens == unwatched(ask(1, PROMPT))[: len(tokens)]
    assert engine.last[1].finish_reason is FinishReason.STOP
    assert engine.last[1].stop_token_id is None
    assert longest_loop(tokens) == 64 - len(CYCLE)
    stats = engine.core.stats().watchdogs
    assert stats is not None
    assert (stats.rollbacks, stats.retracted, dict(stats.stops)["sent"]) == (0, 0, 1)
    assert engine.ring.saves == 0


@pytest.mark.parametrize("whole", [True, False])
def test_without_a_ring_everything_is_stopped(whole: bool) -> None:
    engine = Watched(depth=0).run(ask(1, PROMPT, whole=whole))
    stats = engine.core.stats().watchdogs
    assert stats is not None
    assert (stats.ring_slots, stats.rollbacks) == (0, 0)
    assert dict(stats.stops)["unreachable" if whole else "sent"] == 1
    assert engine.last[1].finish_reason is FinishReason.STOP


def test_what_does_not_loop_is_the_same_with_and_without() -> None:
    item = ask(1, PROMPT, 300, logit_bias=tuple((token, -100.0) for token in CYCLE), logprobs=1)
    engine, plain = Watched().run(item), Watched(watch=False).run(item)
    assert engine.tokens == plain.tokens
    assert engine.logprobs == plain.logprobs
    assert engine.ring.saves > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_after_a_rollback_the_state_is_that_of_the_right_turns_only(
    temperature: float, depth: int
) -> None:
    engine = Watched(depth=depth)
    engine.core.add(ask(1, PROMPT, temperature=temperature, seed=3))
    rollbacks = 0
    while engine.core.has_work():
        (delta,) = engine.step()[:1] or [None]
        sequence = next(iter(engine.core.scheduler.holdings.running()), None)
        if delta is None or sequence is None or not delta.retract:
            continue
        rollbacks += 1
        assert delta.token_ids == ()
        assert sequence.generated == engine.tokens[1]
        fresh = run_right(engine.tokens[1], sequence.computed, sequence.block_table)
        assert engine.model.states[sequence.slot or 0] == fresh.states[0]
        for position in range(sequence.computed):
            block = sequence.block_table[position // 64]
            assert engine.model.kv[block][position % 64] == fresh.kv[block][position % 64]
    assert rollbacks == 3


def run_right(tokens: list[int], computed: int, table: tuple[int, ...]) -> LoopyModel:
    """A model that ran the prompt and then `tokens`, up to `computed` in all, and nothing else."""
    model = LoopyModel(1, 64)
    model.claim_slot(0)
    model.forward([Segment(0, 0, tuple(PROMPT[:64]), RowPhase.PREFILL, 64, table, 0)])
    model.forward([Segment(0, 64, tuple(PROMPT[64:]), RowPhase.PREFILL, 6, table, 1)])
    for position, token in enumerate(tokens[: computed - len(PROMPT)], len(PROMPT)):
        model.forward([Segment(0, position, (token,), RowPhase.DECODE, 1, table, 1)])
    return model


def test_log_probabilities_are_taken_back_with_their_tokens() -> None:
    engine = Watched().run(ask(1, PROMPT, logprobs=0))
    assert len(engine.logprobs[1]) == len(engine.tokens[1])


def test_counts_for_penalties_forget_what_was_taken_back() -> None:
    """The penalty is too weak to leave the loop, and exact counts are part of every logit."""
    options = {"frequency_penalty": 0.01, "logprobs": 0}
    engine = Watched()
    engine.core.add(ask(1, PROMPT, **options))
    while engine.core.has_work():
        for delta in engine.step():
            if not delta.retract:
                continue
            sequence = engine.core.scheduler.sequence(1)
            counts = sequence.sampling.counts(VOCAB)
            assert counts.tolist() == np.bincount(engine.tokens[1], minlength=VOCAB).tolist()
    assert engine.core.stats().watchdogs is not None


class OnlyCycle:
    """A grammar that allows the cycle's tokens and remembers whom it was closed for."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    def open(self, request: GenerationRequest) -> bool:
        return True

    def settled(self) -> list[tuple[int, RequestError | None]]:
        return []

    def wait(self, seconds: float) -> None:
        raise AssertionError("nothing is held")

    def allowed(self, request_id: int, output: Sequence[int]) -> TokenMask | None:
        mask = np.zeros(VOCAB, np.bool_)
        mask[list(CYCLE)] = True
        return mask

    def close(self, request_id: int) -> None:
        self.closed.append(request_id)


@pytest.mark.parametrize("whole", [True, False])
def test_output_under_a_grammar_ends_as_incomplete(whole: bool) -> None:
    masks = OnlyCycle()
    engine = Watched(masks=masks).run(ask(1, PROMPT, grammar="{}", whole=whole))
    assert set(engine.tokens[1]) <= set(CYCLE)
    assert engine.last[1].finish_reason is FinishReason.LENGTH
    assert len(engine.tokens[1]) < 400
    assert masks.closed == [1]


def test_a_ban_yields_to_a_grammar_that_leaves_nothing_else() -> None:
    class OnlyOne(OnlyCycle):
        def allowed(self, request_id: int, output: Sequence[int]) -> TokenMask | None:
            mask = np.zeros(VOCAB, np.bool_)
            mask[33] = True
            return mask

    engine = Watched(masks=OnlyOne()).run(ask(1, PROMPT, grammar="{}"))
    assert set(engine.tokens[1]) == {33}
    assert engine.last[1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("depth", "cached"), [(1, True), (4, False), (8, True)])
def test_a_crowd_with_preemption_and_departures_loses_nothing(depth: int, cached: bool) -> None:
    """The model's own checks fail when a state, a block or a slot is not the sequence's own."""
    rng = random.Random(depth)
    engine = Watched(depth=depth, slots=4, blocks=10, cached=cached)
    asked = 0
    while asked < 40 or engine.core.has_work():
        if asked < 40 and rng.random() < 0.05:
            length = rng.randrange(1, 100)
            item = ask(asked, PROMPT[:length], rng.randrange(50, 500), whole=rng.random() < 0.8)
            engine.core.add(item)
            asked += 1
        if engine.tokens and rng.random() < 0.005:
            engine.core.abort(rng.choice(list(engine.tokens)))
        engine.step()
    stats = engine.core.stats()
    assert stats.watchdogs is not None
    assert stats.preemptions > 0
    assert stats.watchdogs.rollbacks > 20
    assert (stats.running, stats.slots_used, stats.kv_blocks_used) == (0, 0, 0)
    ends = {delta.finish_reason for delta in engine.last.values()}
    assert ends <= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}


def test_an_answer_that_was_cut_leaves_nothing_wrong_in_the_prefix_cache() -> None:
    """A stream's answer is reused, one that may be cut is not, and no token differs."""
    engine = Watched(cached=True)
    answer = engine.run(ask(1, PROMPT)).tokens[1]
    for number, whole in ((2, True), (3, False), (4, True)):
        prompt = [*PROMPT, *answer, 5, 6]
        item = ask(number, prompt, 200, whole=whole)
        expected = Watched(cached=True).run(item)
        assert engine.run(item).tokens[number] == expected.tokens[number]
    cached = [engine.last[n].stats for n in (2, 3, 4)]
    assert cached[0] is not None
    assert cached[0].cached_tokens == 64
    twin = ask(5, [*PROMPT, *answer, 5, 6, *engine.tokens[3], 7], 50, whole=False)
    assert engine.run(twin).tokens[5] == Watched(cached=True).run(twin).tokens[5]
    assert engine.last[5].stats is not None
    assert engine.last[5].stats.cached_tokens > len(prompt)


def test_neighbours_are_not_touched() -> None:
    calm = ask(2, PROMPT[:9], 300, logit_bias=tuple((token, -100.0) for token in CYCLE))
    engine = Watched().run(ask(1, PROMPT), calm, ask(3, PROMPT[:5]))
    assert engine.tokens[2] == unwatched(calm)
    for item in (ask(1, PROMPT), ask(3, PROMPT[:5])):
        assert engine.tokens[item.request_id] == Watched().run(item).tokens[item.request_id]
