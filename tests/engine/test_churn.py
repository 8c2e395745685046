"""Random traffic over thousands of steps on a tiny pool: nothing leaks, no token changes."""

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import GRID
from engine.errors import QueueFullError
from engine.request import FinishReason, GenerationRequest
from engine.scheduler import Sequence
from tests.engine.fake_model import FakeModel, request
from tests.engine.test_core import VOCAB, Engine, prompt

SLOTS, BLOCKS = 5, 9


def random_request(rng: random.Random, request_id: int, prompts: int = 90) -> GenerationRequest:
    max_tokens = rng.choice([1, 5, 20, 70, 150, 200])
    longest = BLOCKS * GRID + 1 - max_tokens
    length = rng.choice([1, 3, 40, 60, 63, 64, 65, 128, 300])
    options: dict[str, Any] = {"ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.5, 1.0]), "seed": rng.getrandbits(64)}
    if rng.random() < 0.2:
        options |= {"frequency_penalty": 1.0, "min_tokens": 3}
    return request(
        request_id,
        prompt(min(length, longest), rng.randrange(prompts)),
        max_tokens,
        priority=rng.choice([0, 0, 0, 1, -1]),
        **options,
    )


def churn(
    seed: int,
    *,
    compaction: bool,
    drafts: bool,
    arrivals: int = 25,
    places: int = 0,
    decoded: bool = False,
    blocks: int = BLOCKS,
) -> dict[str, int]:
    """One run of random traffic; checks every step and, at the end, every token.

    With `places` for checkpoints prompts reuse prefixes, `decoded` those of answers too.
    """
    rng = random.Random(seed)
    engine = Engine(
        slots=SLOTS,
        blocks=blocks,
        max_waiting=8,
        slot_compaction=compaction,
        model=FakeModel(SLOTS, blocks, VOCAB, one_form=decoded),
        prefix_caching=places > 0,
        snapshot_slots=places,
        reuse_decoded=decoded,
    )
    scheduler = engine.core.scheduler
    requests: dict[int, GenerationRequest] = {}
    aborted: set[int] = set()
    steps = 0
    while len(requests) < arrivals or engine.core.has_work():
        while len(requests) < arrivals and rng.random() < 0.3:
            item = random_request(rng, len(requests), 3 if places else 90)
            try:
                engine.core.add(item)
            except QueueFullError:
                break
            requests[item.request_id] = item
        if requests and rng.random() < 0.03:
            victim = rng.choice(list(requests))
            if scheduler_knows(engine, victim):
                aborted.add(victim)
            engine.core.abort(victim)
        if drafts:
            for sequence in scheduler.decoding():
                guess = [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
                scheduler.propose(sequence.request_id, guess)
        first = min((*scheduler.holdings.running(), *scheduler.waiting), key=by_key, default=None)
        if first is not None and first.slot is None:
            first = None  # it waits for those that run to end
        progress = (first.computed, len(first.generated)) if first else (0, 0)
        engine.step()
        scheduler.check()
        if compaction:
            used = [s.slot for s in scheduler.holdings.running()]
            assert used == list(range(len(used)))
        if first is not None and first.finish_reason is None:
            assert (first.computed, len(first.generated)) > progress, "the first must get on"
            assert first.slot is not None, "the first must not be preempted"
        steps += 1
        assert steps < 20_000, "livelock"
    engine.finish()
    for request_id, item in requests.items():
        reasons = [d.finish_reason for d in engine.deltas[request_id] if d.finish_reason]
        assert len(reasons) == 1
        assert (reasons[0] is FinishReason.ABORT) == (request_id in aborted)
        alone = Engine(slots=1, blocks=BLOCKS, model=FakeModel(1, BLOCKS, VOCAB, one_form=decoded))
        alone.core.add(item)
        alone.finish()
        seen = engine.tokens(request_id)
        expected = alone.tokens(request_id)
        assert seen == (expected[: len(seen)] if request_id in aborted else expected)
    stats = engine.core.stats()
    assert stats.generation_tokens == sum(len(engine.tokens(i)) for i in requests)
    counts = {"steps": steps, "preemptions": stats.preemptions, "aborted": len(aborted)}
    if (cache := stats.prefix_cache) is not None:
        counts |= {"hits": cache.hits, "evicted": cache.checkpoints_evicted}
        counts["reclaimed"] = cache.blocks_evicted
    return counts


def by_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


def scheduler_knows(engine: Engine, request_id: int) -> bool:
    return request_id in engine.core.scheduler.requests()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), compaction=st.booleans(), drafts=st.booleans())
def test_random_traffic_changes_no_token_and_leaks_nothing(
    seed: int, compaction: bool, drafts: bool
) -> None:
    churn(seed, compaction=compaction, drafts=drafts)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    drafts=st.booleans(),
    places=st.integers(1, 5),
    decoded=st.booleans(),
    blocks=st.integers(BLOCKS, 3 * BLOCKS),
)
def test_reused_prefixes_change_no_token_and_leak_nothing(
    seed: int, drafts: bool, places: int, decoded: bool, blocks: int
) -> None:
    churn(seed, compaction=True, drafts=drafts, places=places, decoded=decoded, blocks=blocks)


def test_a_long_churn_reuses_and_evicts() -> None:
    total = dict.fromkeys(("preemptions", "hits", "evicted", "reclaimed"), 0)
    for seed in range(4):
        counts = churn(
            seed,
            compaction=seed != 3,
            drafts=seed == 2,
            arrivals=50,
            places=3 + seed % 2,
            decoded=seed > 1,
            blocks=BLOCKS + 6 * (seed % 3),
        )
        total = {name: total[name] + counts[name] for name in total}
    assert total["hits"] > 10, total
    assert min(total["preemptions"], total["evicted"], total["reclaimed"]) > 8, total


def test_a_long_churn_preempts_often() -> None:
    total = {"steps": 0, "preemptions": 0, "aborted": 0}
    for seed in range(4):
        counts = churn(seed, compaction=seed != 3, drafts=seed == 2, arrivals=90)
        total = {name: total[name] + counts[name] for name in total}
    assert total["steps"] > 3000
    assert total["preemptions"] > 50
    assert total["aborted"] > 10
