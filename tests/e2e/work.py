"""Requests of every kind, run by the packaged model in this process or by a server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import httpx

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import FinishReason, GenerationRequest, SamplingParams, TokenLogprobs

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
    return build_engine(replace(config, **settings), lambda phase, seconds, detail="": None).core


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


def growing(count: int = 12) -> list[GenerationRequest]:
    """Requests that fit into one KV block when they come and need a second one later."""
    rng = random.Random(6)
    return [
        GenerationRequest(
            number,
            tuple(rng.randrange(3, 2000) for _ in range(rng.randint(40, 60))),
            SamplingParams(
                max_tokens=40, temperature=0.7 * (number % 2), seed=number, ignore_eos=True
            ),
        )
        for number in range(count)
    ]


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
