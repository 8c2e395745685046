"""The scheduler with the cache, on the arithmetic model: what is reused, and that no token changes.

The model's prompt rows and generated rows leave different traces, so that a prefix of the wrong
kind, a state of another position or a block of another prompt shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.config import GRID
from engine.errors import InvariantError
from engine.request import FinishReason, GenerationRequest, PrefixCacheStats
from engine.runner import RowPhase
from tests.engine.fake_model import FakeModel, request
from tests.engine.test_core import VOCAB, Engine, prompt

BLOCKS = 64


def cached(
    *, places: int = 8, one_form: bool = False, blocks: int = BLOCKS, **extra: Any
) -> Engine:
    """An engine with the cache; a model of one form may reuse what it decoded."""
    return Engine(
        blocks=blocks,
        model=FakeModel(8, blocks, VOCAB, one_form=one_form),
        prefix_caching=True,
        snapshot_slots=places,
        reuse_decoded=one_form,
        **extra,
    )


def answer(engine: Engine, item: GenerationRequest) -> tuple[list[int], int]:
    """(tokens, cached tokens) of one request that runs alone."""
    engine.core.add(item)
    engine.finish()
    engine.core.scheduler.check()
    stats = engine.last(item.request_id).stats
    assert stats is not None
    return engine.tokens(item.request_id), stats.cached_tokens


def without(item: GenerationRequest, *, one_form: bool = False) -> list[int]:
    """The tokens of a request in an engine without a cache."""
    engine = Engine(slots=1, blocks=BLOCKS, model=FakeModel(1, BLOCKS, VOCAB, one_form=one_form))
    engine.core.add(item)
    engine.finish()
    return engine.tokens(item.request_id)


def stats(engine: Engine) -> PrefixCacheStats:
    found = engine.core.stats().prefix_cache
    assert found is not None
    return found


def ask(number: int, tokens: Sequence[int], max_tokens: int = 8, **extra: Any) -> GenerationRequest:
    return request(number, tokens, max_tokens, ignore_eos=True, **extra)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200, 300])
def test_the_same_prompt_again_is_computed_from_its_last_grid_point(length: int) -> None:
    engine = cached()
    expected = without(ask(1, prompt(length)))
    first, second = (answer(engine, ask(n, prompt(length))) for n in (1, 2))
    assert first == (expected, 0)
    assert second == (expected, (length - 1) // GRID * GRID)
    found = stats(engine)
    assert found.hits == (length > GRID)
    assert dict(found.misses)["short"] == (0 if length > GRID else 2)
    assert engine.core.stats().prompt_tokens == 2 * length - second[1]


def test_only_the_rows_behind_the_hit_run() -> None:
    engine = cached()
    answer(engine, ask(1, prompt(200)))
    engine.model.steps.clear()
    answer(engine, ask(2, prompt(200), 1))
    assert [[(s.start, len(s.token_ids)) for s in step] for step in engine.model.steps] == [
        [(192, 8)]
    ]


def test_where_two_prompts_part_the_third_begins() -> None:
    engine = cached()
    shared = prompt(150)
    texts = [[*shared, *prompt(100, salt)] for salt in (1, 2, 3, 4)]
    found = [answer(engine, ask(n, text)) for n, text in enumerate(texts)]
    assert [tokens for tokens, _ in found] == [without(ask(9, text)) for text in texts]
    assert [reused for _, reused in found] == [0, 0, 128, 128]
    assert dict(stats(engine).misses) == {"short": 0, "cold": 1, "no_checkpoint": 1}


def test_prompts_that_come_together_share_what_is_there_when_they_start() -> None:
    engine = cached()
    shared = prompt(130)
    answer(engine, ask(0, [*shared, 5]))
    items = [ask(n, [*shared, *prompt(40 * n, n)]) for n in range(1, 6)]
    for item in items:
        engine.core.add(item)
    engine.step()
    holders = engine.core.scheduler.holdings.blocks.holders
    tables = [s.block_table for s in engine.core.scheduler.holdings.running()]
    assert len({table[:2] for table in tables}) == 1
    assert [holders(block) for block in tables[0][:2]] == [len(tables) + 1] * 2
    engine.finish()
    for item in items:
        assert engine.tokens(item.request_id) == without(item)
        last = engine.last(item.request_id).stats
        assert last is not None
        assert last.cached_tokens == 128


@pytest.mark.parametrize(("salt", "together"), [(0, True), (1, False)])
def test_what_is_shared_with_a_running_sequence_needs_no_room(salt: int, together: bool) -> None:
    engine = cached(blocks=8)
    engine.core.add(ask(1, prompt(300), 40))
    while not engine.core.scheduler.decoding():
        engine.step()
    engine.core.add(ask(2, prompt(300, salt), 4))
    engine.step()
    assert (engine.core.stats().running == 2) is together
    engine.finish()
    assert engine.tokens(2) == without(ask(2, prompt(300, salt), 4))


def chat(engine: Engine, *, one_form: bool) -> list[int]:
    """Three turns of one chat; returns the cached tokens of each."""
    text: list[int] = prompt(100)
    reused = []
    for turn in range(3):
        tokens, hit = answer(engine, ask(turn, text, 150))
        assert tokens == without(ask(9, text, 150), one_form=one_form)
        reused.append(hit)
        text = [*text, *tokens, *prompt(30, turn)]
    return reused


def test_a_chat_resumes_at_its_prompt_when_decoded_states_differ() -> None:
    assert chat(cached(), one_form=False) == [0, 64, 256]


def test_a_chat_resumes_at_the_end_of_its_turn_when_they_do_not() -> None:
    engine = cached(one_form=True)
    assert chat(engine, one_form=True) == [0, 192, 384]
    # Of each turn the checkpoint of the prompt and the last of those that rolled along.
    assert stats(engine).checkpoints == 6


def test_a_state_of_the_wrong_kind_would_show() -> None:
    """The tests above can fail: the same model with decoded states reused gives other tokens."""
    engine = cached()
    reuse = engine.core.scheduler._reuse
    assert reuse is not None
    object.__setattr__(reuse._port, "decoded", True)
    with pytest.raises(AssertionError):
        chat(engine, one_form=False)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_turn_that_ends_in_the_middle_of_a_burst_publishes_what_was_kept(drafts: int) -> None:
    for length in range(60, 70):
        engine = cached(one_form=True)
        item = ask(1, prompt(10), length)
        expected = without(item, one_form=True)
        engine.core.add(item)
        engine.finish({1: expected} if drafts else None, drafts)
        assert engine.tokens(1) == expected
        text = [*prompt(10), *expected, 5, 6, 7]
        _, hit = answer(engine, ask(2, text))
        assert hit == ((10 + length - 1) // GRID * GRID)
        assert engine.tokens(2) == without(ask(2, text), one_form=True)


def test_checkpoints_cost_a_prompt_no_step() -> None:
    for length, chunks in ((64, 1), (65, 1), (127, 1), (130, 2), (300, 3)):
        engine = cached()
        answer(engine, ask(1, prompt(length), 1))
        assert len(engine.model.steps) == chunks
        assert all(s.start % GRID == 0 for step in engine.model.steps for s in step)


def test_tenants_share_nothing() -> None:
    engine = cached()
    for number, salt in enumerate(["a", "b", None, "a"]):
        item = ask(number, prompt(200))
        item = GenerationRequest(number, item.prompt_ids, item.sampling, cache_salt=salt)
        assert answer(engine, item)[1] == (192 if number == 3 else 0)


def test_blocks_that_nobody_needs_are_given_up_before_anybody_is_preempted() -> None:
    engine = cached(blocks=8)
    for number in range(6):
        item = ask(number, prompt(290, number), 100)
        assert answer(engine, item)[0] == without(item)
    assert engine.core.stats().preemptions == 0
    assert stats(engine).blocks_evicted > 10
    assert engine.core.stats().kv_blocks_used == 0


def test_a_preempted_sequence_comes_back_behind_its_own_prefix() -> None:
    engine = cached(slots=3, blocks=7, one_form=True)
    items = [ask(n, prompt(130, n), 120) for n in range(3)]
    for item in items:
        engine.core.add(item)
    engine.finish()
    assert engine.core.stats().preemptions > 0
    for item in items:
        assert engine.tokens(item.request_id) == without(item, one_form=True)
        last = engine.last(item.request_id).stats
        assert last is not None
        assert last.cached_tokens == 0, "what a sequence computed itself was not cached for it"


def test_resumed_behind_everything_it_decodes_at_once() -> None:
    """Preempted on the grid, it needs neither a prompt row nor a replayed one."""
    engine = cached(one_form=True)
    item = ask(1, prompt(60), 40)
    expected = without(item, one_form=True)
    engine.core.add(item)
    while True:
        engine.step()
        (sequence,) = engine.core.scheduler.holdings.running()
        if sequence.computed == 64:
            break
    engine.core.scheduler.preempt(sequence)
    engine.model.steps.clear()
    engine.finish()
    assert engine.tokens(1) == expected
    assert {s.phase for step in engine.model.steps for s in step} == {RowPhase.DECODE}


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    engine = cached()
    engine.core.add(ask(1, prompt(300)))
    engine.step()
    assert len(engine.core.scheduler.holdings.cache or ()) == 0, "no checkpoint was due yet"
    engine.model.fail_next = RuntimeError("broken")
    engine.finish()
    assert engine.last(1).finish_reason is FinishReason.ERROR
    assert (stats(engine).blocks, stats(engine).checkpoints) == (0, 0)
    assert answer(engine, ask(2, prompt(300)))[0] == without(ask(2, prompt(300)))


def test_a_step_that_fails_gives_back_the_places_that_it_would_have_filled() -> None:
    engine = cached()
    engine.model.fail_next = RuntimeError("broken")
    engine.core.add(ask(1, prompt(100)))
    engine.finish()
    assert engine.last(1).finish_reason is FinishReason.ERROR
    engine.core.scheduler.check()
    assert stats(engine).checkpoints == 0


def test_equal_prompts_in_one_step_leave_one_checkpoint() -> None:
    engine = cached(max_prefill_tokens=256)
    for number in (1, 2):
        engine.core.add(ask(number, prompt(100)))
    engine.finish()
    assert [s.saves for s in engine.model.steps[0]] == [((64, 0),), ((64, 1),)]
    assert engine.tokens(1) == engine.tokens(2)
    engine.core.scheduler.check()
    # One of the prompt and one of the turn at most.
    assert stats(engine).checkpoints_saved == 1
    assert answer(engine, ask(3, prompt(100)))[1] == 64


def test_what_a_failed_sequence_published_before_is_withdrawn() -> None:
    engine = cached()
    engine.core.add(ask(1, prompt(200), 50))
    for _ in range(5):
        engine.step()
    assert stats(engine).checkpoints == 1
    engine.model.fail_next = RuntimeError("broken")
    engine.finish()
    assert (stats(engine).blocks, stats(engine).checkpoints) == (0, 0)


def test_an_aborted_sequence_leaves_its_prefix() -> None:
    engine = cached()
    engine.core.add(ask(1, prompt(200), 50))
    for _ in range(4):
        engine.step()
    engine.core.abort(1)
    engine.finish()
    assert answer(engine, ask(2, prompt(200)))[1] == 192


def test_few_places_hold_the_prefix_that_is_used() -> None:
    engine = cached(places=2)
    shared = prompt(130)
    for number in range(12):
        text = shared if number % 2 else prompt(140, 10 + number)
        _, hit = answer(engine, ask(number, [*text, number + 1]))
        assert hit == (128 if number % 2 and number > 1 else 0)
    assert stats(engine).checkpoints == 2
    assert stats(engine).checkpoints_evicted > 4


def test_turns_at_once_take_half_of_the_places_at_most() -> None:
    engine = cached(places=4, one_form=True)
    for number in range(6):
        engine.core.add(ask(number, prompt(20, number), 100))
    engine.finish()
    assert stats(engine).checkpoints == 2


def test_idle_blocks_that_nobody_counts_are_found() -> None:
    engine = cached()
    answer(engine, ask(1, prompt(200)))
    engine.core.scheduler.check_idle()
    blocks = engine.core.scheduler.holdings.blocks
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.keep(taken[0])
    blocks.free(taken)
    with pytest.raises(InvariantError, match="prefix cache has 3 KV blocks, 4 are idle"):
        engine.core.scheduler.check_idle()
    with pytest.raises(InvariantError):
        engine.core.scheduler.check()


def test_without_places_there_is_no_cache() -> None:
    engine = cached(places=0)
    assert answer(engine, ask(1, prompt(200)))[1] == 0
    assert answer(engine, ask(2, prompt(200)))[1] == 0
    assert engine.core.stats().prefix_cache is None
