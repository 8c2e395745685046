"""The prefix cache through a real server: what was not computed is told, tenants are apart."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.e2e.servers import complete, gauges
from tests.spark_server.test_server import Server

PROMPT = [20 + (7 * i) % 1500 for i in range(300)]


def cached(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_second_time_a_prompt_is_cached_and_the_answer_the_same(server: Server) -> None:
    before = gauges(server.url)
    ask = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "cache_salt": "twice"}
    first, second = (complete(server.url, **ask).json() for _ in range(2))
    assert (cached(first), cached(second)) == (0, 256)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    other = complete(server.url, **{**ask, "cache_salt": "other"}).json()
    assert cached(other) == 0
    assert other["choices"][0]["text"] == first["choices"][0]["text"]
    after = gauges(server.url)
    rises = {
        name: after[f"spark_prefix_cache_{name}"] - before[f"spark_prefix_cache_{name}"]
        for name in ("hits_total", "hit_tokens_total", "queried_tokens_total")
    }
    assert rises == {"hits_total": 1, "hit_tokens_total": 256, "queried_tokens_total": 900}
    assert after["spark_prefix_cache_blocks"] > 0
    assert after["spark_prefix_cache_checkpoint_places"] == 16


def test_a_stream_tells_it_too_and_a_chat_goes_on_behind_its_turn(server: Server) -> None:
    messages = [{"role": "user", "content": "Tell me about the mill. " * 30}]
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": 70,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": "chat",
    }
    url = server.url + "/v1/chat/completions"
    first = httpx.post(url, json=body, timeout=60).json()
    answer = first["choices"][0]["message"]["content"]
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And then?"},
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(url, json={**body, **options}, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    reused = cached(events[-1])
    assert reused % 64 == 0
    assert 0 < reused < events[-1]["usage"]["prompt_tokens"]
    assert reused >= (first["usage"]["prompt_tokens"] - 1) // 64 * 64
