"""The tokens of a request do not depend on its company, on preemption, or on when it came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import httpx
import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import FinishReason, GenerationRequest, SamplingParams, TokenLogprobs
from tests.e2e.servers import gauges
from tests.spark_server.test_server import Server

MODEL = str(files("spark_server") / "assets" / "spark-tiny")
COUNT = 64


@dataclass(frozen=True)
class Answer:
    """What a request got."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: FinishReason


def core(**settings: Any) -> EngineCore:
    """The packaged model with 256 positions, in this process."""
    config = EngineConfig(
        MODEL, max_seq_len=256, max_prefill_tokens=128, memory_budget=3 * 2**30, threads=1
    )
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__} | settings
    return build_engine(EngineConfig(**fields), lambda phase, seconds, detail="": None).core


def sampling(number: int, rng: random.Random) -> SamplingParams:
    """Greedy, plain sampling, and everything that shapes a distribution, in turn."""
    tokens = rng.choice((1, 5, 12, 20))
    common: dict[str, Any] = {"max_tokens": tokens, "seed": number, "logprobs": 2}
    match number % 4:
        case 0:
            return SamplingParams(**common, temperature=0.0, ignore_eos=True)
        case 1:
            return SamplingParams(**common, temperature=0.8)
        case 2:
            return SamplingParams(
                **common,
                temperature=0.8,
                top_p=0.9,
                presence_penalty=0.5,
                frequency_penalty=0.3,
                repetition_penalty=1.1,
                ignore_eos=True,
            )
    return SamplingParams(
        **common, temperature=1.2, top_k=20, min_p=0.02, logit_bias=((7, 3.0), (9, -100.0))
    )


def requests(count: int = COUNT, *, longest: int = 150) -> list[GenerationRequest]:
    """Prompts of one token up to several chunks of the prefill, in no order."""
    rng = random.Random(5)
    lengths = [1, 2, 63, 64, 65, 128, 129, longest]
    found = []
    for number in range(count):
        length = lengths[number] if number < len(lengths) else rng.randint(1, longest)
        prompt = tuple(rng.randrange(3, 2000) for _ in range(min(length, longest)))
        found.append(GenerationRequest(number, prompt, sampling(number, rng)))
    return found


def run(engine: EngineCore, work: Sequence[GenerationRequest], width: int) -> dict[int, Answer]:
    """Keep `width` requests in flight until all have ended."""
    todo = list(reversed(work))
    tokens: dict[int, list[int]] = {request.request_id: [] for request in work}
    logprobs: dict[int, list[TokenLogprobs]] = {request.request_id: [] for request in work}
    answers: dict[int, Answer] = {}
    while len(answers) < len(work):
        while todo and len(work) - len(todo) - len(answers) < width:
            engine.add(todo.pop())
        for delta in engine.step():
            number = delta.request_id
            tokens[number] += delta.token_ids
            logprobs[number] += delta.logprobs
            if delta.finish_reason is not None:
                assert delta.error is None
                answers[number] = Answer(
                    tuple(tokens[number]), tuple(logprobs[number]), delta.finish_reason
                )
    assert not engine.has_work()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.slots_used, stats.kv_blocks_used) == (0, 0, 0, 0)
    return answers


@pytest.fixture(scope="module")
def wide() -> EngineCore:
    return core()


@pytest.fixture(scope="module")
def alone(wide: EngineCore) -> dict[int, Answer]:
    answers = run(wide, requests(), 1)
    assert {answer.reason for answer in answers.values()} <= {
        FinishReason.LENGTH,
        FinishReason.STOP,
    }
    assert sum(len(answer.tokens) for answer in answers.values()) > 5 * COUNT
    return answers


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


# ---- over HTTP ---------------------------------------------------------------------------


def bodies(count: int, *, tokens: int = 16) -> list[dict[str, Any]]:
    rng = random.Random(11)
    shapes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.4},
        {"temperature": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    ]
    return [
        {
            "prompt": [rng.randrange(3, 2000) for _ in range(rng.randint(1, 120))],
            "max_tokens": tokens,
            "seed": number,
            "ignore_eos": True,
            "logprobs": 0,
            **shapes[number % 3],
        }
        for number in range(count)
    ]


async def post_all(url: str, work: list[dict[str, Any]], width: int) -> list[Any]:
    """The choices of every completion, `width` requests in flight."""
    gate = asyncio.Semaphore(width)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        async with gate:
            response = await client.post(url + "/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:
        return await asyncio.gather(*(one(client, body) for body in work))


@pytest.mark.server
def test_company_changes_no_byte_over_http(server: Server, cramped: Server) -> None:
    work = bodies(32)
    alone = asyncio.run(post_all(server.url, work, 1))
    assert asyncio.run(post_all(server.url, work, 32)) == alone
    before = gauges(cramped.url)["spark_preemptions_total"]
    # Four sequences of up to 136 tokens do not fit into 320 together.
    assert asyncio.run(post_all(cramped.url, work, 8)) == alone
    assert gauges(cramped.url)["spark_preemptions_total"] > before


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
