"""The tokens of a request do not depend on its company, on preemption, or on when it came."""

from __future__ import annotations

import asyncio

import pytest

from engine.core import EngineCore
from engine.request import GenerationRequest, SamplingParams
from tests.e2e.servers import gauges
from tests.e2e.work import Answer, bodies, core, post_all, requests, run
from tests.spark_server.test_server import Server


@pytest.mark.parametrize("width", [8, 32])
def test_company_changes_no_bit(wide: EngineCore, alone: dict[int, Answer], width: int) -> None:
    assert run(wide, requests(), width) == alone


def test_the_order_of_arrival_changes_no_bit(wide: EngineCore, alone: dict[int, Answer]) -> None:
    assert run(wide, requests()[::-1], 20) == alone


def test_preemption_changes_no_bit(alone: dict[int, Answer]) -> None:
    small = core(max_batch_size=8, kv_tokens=384)
    assert run(small, requests(), 16) == alone
    assert small.stats().preemptions > 0


def test_small_chunks_of_the_prefill_change_no_bit(alone: dict[int, Answer]) -> None:
    assert run(core(max_batch_size=8, max_prefill_tokens=64), requests(), 8) == alone


def test_aborts_of_others_change_no_bit(wide: EngineCore, alone: dict[int, Answer]) -> None:
    """Slots that change hands midway hold nothing of their former owner."""
    work = requests(24)
    doomed = [
        GenerationRequest(1000 + n, r.prompt_ids, SamplingParams(max_tokens=99, ignore_eos=True))
        for n, r in enumerate(work)
    ]
    mixed = [request for pair in zip(doomed, work, strict=True) for request in pair]
    for request in mixed:
        wide.add(request)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in mixed}
    steps = 0
    while wide.has_work():
        for delta in wide.step():
            tokens[delta.request_id] += delta.token_ids
        if steps < len(doomed):
            wide.abort(doomed[steps].request_id)
        steps += 1
    assert {r.request_id: tuple(tokens[r.request_id]) for r in work} == {
        r.request_id: alone[r.request_id].tokens for r in work
    }


@pytest.mark.server
def test_company_changes_no_byte_over_http(server: Server, cramped: Server) -> None:
    work = bodies(32)
    alone = asyncio.run(post_all(server.url, work, 1))
    assert asyncio.run(post_all(server.url, work, 32)) == alone
    before = gauges(cramped.url)["spark_preemptions_total"]
    # Four sequences of up to 136 tokens do not fit into 320 together.
    assert asyncio.run(post_all(cramped.url, work, 8)) == alone
    assert gauges(cramped.url)["spark_preemptions_total"] > before
    for each in (server, cramped):
        assert gauges(each.url)["spark_jit_compiles_total"] == 0


@pytest.mark.server
def test_choices_of_one_seed_differ_and_repeat(server: Server) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    three = asyncio.run(post_all(server.url, [{**body, "seed": 42, "n": 3}] * 4, 4))
    assert three[1:] == three[:1] * 3
    texts = [choice["text"] for choice in three[0]]
    assert len(set(texts)) == 3
    one = asyncio.run(post_all(server.url, [{**body, "seed": 42}], 1))
    assert one[0][0]["text"] == texts[0]
    other = asyncio.run(post_all(server.url, [{**body, "seed": 43}], 1))
    assert other[0][0]["text"] != texts[0]
