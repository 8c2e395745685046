"""A prompt on which spark-tiny goes in circles: with and without watchdogs, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.servers import gauges, serving, wait_idle
from tests.spark_server.test_server import Server

pytestmark = pytest.mark.server

PROMPT = "Once upon a time there was a fox. The fox was red. The fox was red."
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
    "skip_special_tokens": False,
}
LINE = "What is the opposite of east?"


@pytest.fixture(scope="module")
def watching() -> Iterator[Server]:
    words = ("--watchdogs", "on", "--max-batch-size", "4", "--max-seq-len", "1024")
    with serving(*words) as running:
        yield running


def whole(url: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(url + "/v1/completions", json=BODY | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(url: str, **fields: Any) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens."""
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}} | fields
    text, finish, tokens = "", "", 0
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return text, finish, tokens


def counts(url: str) -> dict[str, float]:
    wait_idle(url)
    return {n: v for n, v in gauges(url).items() if n.startswith(("spark_watchdog_", "spark_dec"))}


def risen(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("spark_watchdog_"): after[name] - value
        for name, value in before.items()
        if after[name] != value
    }


def test_without_watchdogs_it_loops_to_the_end(server: Server) -> None:
    body = whole(server.url)
    (choice,) = body["choices"]
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 400)
    assert choice["text"].count(LINE) > 10
    text, finish, tokens = streamed(server.url)
    assert (text, finish, tokens) == (choice["text"], "length", 400)
    assert set(counts(server.url).values()) == {0.0}


def test_an_answer_is_steered_back(server: Server, watching: Server) -> None:
    plain = whole(server.url)["choices"][0]["text"]
    before = counts(watching.url)
    assert before["spark_decode_ring_slots"] == 8
    body = whole(watching.url, metrics=True, logprobs=0)
    (choice,) = body["choices"]
    rose = risen(before, counts(watching.url))
    told = choice["metrics"]
    assert rose["rollbacks_total"] == told["rollbacks"] > 0
    assert rose["retracted_tokens_total"] == told["retracted_tokens"] > 50
    assert rose['detections_total{kind="loop"}'] >= told["rollbacks"]
    # The first copy of the loop stays, and what was said before it.
    start = plain[: plain.index(LINE) + len(LINE)]
    assert choice["text"].startswith(start)
    assert choice["text"] != plain
    assert choice["text"].count(LINE) < plain.count(LINE)
    # Log-probabilities and the count are those of the text that is left.
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["completion_tokens"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    stopped = choice["finish_reason"] == "stop"
    assert rose.get('stops_total{cause="exhausted"}', 0) == stopped
    again = whole(watching.url, logprobs=0)["choices"][0]
    assert (again["text"], again["finish_reason"]) == (choice["text"], choice["finish_reason"])


def test_a_stream_is_stopped(server: Server, watching: Server) -> None:
    plain = whole(server.url)["choices"][0]["text"]
    before = counts(watching.url)
    text, finish, tokens = streamed(watching.url)
    assert risen(before, counts(watching.url)) == {
        'detections_total{kind="loop"}': 1,
        'stops_total{cause="sent"}': 1,
    }
    assert finish == "stop"
    assert plain.startswith(text)
    assert 64 <= tokens < 200
    assert text.count(LINE) >= 3


def test_what_does_not_loop_is_the_same(server: Server, watching: Server) -> None:
    before = counts(watching.url)
    for fields in ({"temperature": 0}, {"seed": 3}, {"seed": 4, "stop": [" the "]}):
        body = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]} | fields
        answers = [
            httpx.post(running.url + "/v1/chat/completions", json=body, timeout=60).json()
            for running in (server, watching)
        ]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"] == answers[1]["usage"]
    assert risen(before, counts(watching.url)) == {}


def test_a_stop_string_in_the_loop_ends_it_first(watching: Server) -> None:
    before = counts(watching.url)
    choice = whole(watching.url, stop=["west"])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"].endswith("The opposite of east is ")
    assert risen(before, counts(watching.url)) == {}
