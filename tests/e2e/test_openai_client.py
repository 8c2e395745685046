"""The openai client and plain HTTP on a real server with the packaged model."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.servers import busy_gauges, complete, gauges, wait_idle
from tests.spark_server.test_server import Server

pytestmark = pytest.mark.server

MODEL = "spark-tiny"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}])
def test_a_chat_is_the_same_streamed_or_whole(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": user("Tell me a short story."),
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 3,
        **fields,
    }
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    content = "".join(choice.delta.content or "" for choice in choices)
    assert content == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    streamed = [
        entry
        for choice in choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert streamed == entries
    # The end token may or may not be listed; every other one is.
    assert whole.usage.completion_tokens - len(entries) in (0, 1)
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert math.fsum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
        if fields["temperature"] == 0:
            assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_n_choices_with_one_usage(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": user("Hello!"),
        "max_tokens": 12,
        "n": 3,
        "seed": 3,
        "temperature": 1.0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 36
    texts = ["", "", ""]
    with client.chat.completions.create(**ask, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    free = client.completions.create(**ask).choices[0]
    assert free.finish_reason == "length"
    # From the middle of a word to the middle of the next: no border of a token.
    at = free.text.index(" ", 10)
    stop = free.text[at - 1 : at + 2]
    want = free.text[: free.text.index(stop)]
    if stream:
        with client.completions.create(**ask, stop=[stop, "@@"], stream=True) as events:
            parts = [event.choices[0] for event in events]
        text, reason = "".join(part.text for part in parts), parts[-1].finish_reason
    else:
        choice = client.completions.create(**ask, stop=stop).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert text == want
    assert reason == "stop"


def test_tools_in_the_prompt(client: openai.OpenAI) -> None:
    messages: Any = user("What is the weather in Paris?")
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=60
    )
    message = answer.choices[0].message
    calls = message.tool_calls or []
    for call in calls:
        assert call.type == "function"
        assert isinstance(json.loads(call.function.arguments), dict)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    if calls:
        assert answer.choices[0].finish_reason == "tool_calls"
        messages = [
            *messages,
            message,
            {"role": "tool", "tool_call_id": calls[0].id, "content": "18 degrees"},
        ]
        second = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=20
        )
        assert second.choices[0].message.content is not None


def test_completions_of_ids_and_echo(client: openai.OpenAI, server: Server) -> None:
    text = "Once upon a time"
    ids = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    by_text = client.completions.create(prompt=text, **fields).choices[0].text
    by_ids = client.completions.create(prompt=ids, **fields)
    assert by_ids.choices[0].text == by_text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(ids)
    for prompt in (text, ids, [text, text], [ids, ids]):
        echoed = client.completions.create(prompt=prompt, echo=True, **fields)
        assert {choice.text for choice in echoed.choices} == {text + by_text}


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("completions", {"prompt": [5] * 1024}, 400, "1024"),
    ("completions", {"prompt": [5] * 1000, "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "model": "nope"}, 404, "nope"),
    ("completions", {"prompt": [999999]}, 400, "999999"),
    ("completions", {"prompt": [-1]}, 400, "-1"),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "x", "n": 1000}, 400, "n"),
    ("completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("completions", {"prompt": "x", "logit_bias": {"999999": 1}}, 400, "999999"),
    ("completions", {"prompt": "x", "stop_token_ids": [999999]}, 400, "999999"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": user("x" * 9000)}, 400, "1024"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_answered_and_leaves_nothing(server: Server, stream: bool) -> None:
    for path, body, status, words in BAD:
        response = httpx.post(f"{server.url}/v1/{path}", json=body | {"stream": stream}, timeout=20)
        assert response.status_code == status, (body, response.text)
        error = response.json()["error"]
        assert words in error["message"] or words == error["param"], (body, error)
        assert set(error) == {"message", "type", "param", "code"}
    assert complete(server.url, prompt="x", max_tokens=2).status_code == 200
    wait_idle(server.url)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(server: Server, value: str) -> None:
    for field in ("temperature", "top_p", "presence_penalty", "min_p"):
        text = f'{{"prompt": "x", "{field}": {value}}}'
        response = httpx.post(server.url + "/v1/completions", content=text, timeout=20)
        assert response.status_code == 400, response.text
    assert complete(server.url, prompt="x", max_tokens=2).status_code == 200


def test_the_longest_prompt_gets_one_token(server: Server) -> None:
    answer = complete(server.url, prompt=[5] * 1023, max_tokens=1, temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1
    answer = complete(server.url, prompt=[5] * 1020, max_tokens=100, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["total_tokens"] == 1024
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_health_ready_version_models(server: Server) -> None:
    for path in ("/health", "/ready"):
        response = httpx.get(server.url + path)
        assert response.status_code == 200
        assert response.json()["status"] == "ready"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", httpx.get(server.url + "/version").json()["version"])
    (model,) = httpx.get(server.url + "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["max_batch_size"]) == (MODEL, 1024, 32)


def test_the_ledger_adds_up(server: Server) -> None:
    ledger = httpx.get(server.url + "/debug/ledger").json()
    terms = ledger["terms"]
    assert sum(term["bytes"] for term in terms) == ledger["total_bytes"] <= ledger["budget_bytes"]
    exact = {term["name"]: term["bytes"] for term in terms if term["kind"] == "exact"}
    assert exact
    assert all(term["why"] for term in terms)
    now = gauges(server.url)
    for term in terms:
        series = [name for name in now if f'"{term["name"]}"' in name]
        assert any(now[name] == term["bytes"] for name in series if "ledger_bytes" in name)
    # State of 32 slots and a dummy: 3 layers of h [4, 64, 64] and conv [512, 4], float32.
    blob = 3 * (4 * 64 * 64 + 512 * 4) * 4
    states = [value for value in exact.values() if value in (32 * blob, 33 * blob)]
    assert states, exact
    assert ledger["free_bytes"] == ledger["budget_bytes"] - ledger["total_bytes"]


@pytest.mark.parametrize(
    "text", ["Hello, world!", " \n\t ", "Zoë 你好 🙂\u200d", "a" * 500, "<|im_end|>"]
)
def test_tokens_make_a_round_trip(server: Server, text: str) -> None:
    tokens = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = httpx.post(server.url + "/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == text


def test_names_of_clients_make_no_series(server: Server) -> None:
    rng = random.Random(1)

    def junk() -> str:
        return "".join(rng.choice('abc"\\{}\n=,é') for _ in range(12))

    def shower(count: int) -> None:
        with httpx.Client(base_url=server.url) as http:
            for _ in range(count):
                headers = {"x-request-id": f"r{rng.random()}"}
                body = {"model": junk(), "prompt": junk(), "user": junk()}
                http.post("/v1/completions", json=body, headers=headers)
                http.get(f"/{rng.random()}/{rng.random()}", headers=headers)
                http.get(f"/v1/models/m{rng.random()}")
                http.request(rng.choice(("PURGE", "LOCK", "REPORT", "PUT", "TRACE")), "/health")

    complete(server.url, prompt="x", max_tokens=1, model=MODEL, user="me")
    shower(2)
    before = set(gauges(server.url))
    shower(60)
    assert set(gauges(server.url)) == before
    assert not busy_gauges(server.url)
