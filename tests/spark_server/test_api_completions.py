"""Completions, log-probabilities and numbers of a request, in process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spark_server.api_harness import (
    error_of,
    events_of,
    make_api,
)
from tests.spark_server.fake_engine import Script


@pytest.mark.parametrize("prompts", [["A very long prompt", "Hi"], [[65, 66, 67], [68]]])
def test_choices_of_many_prompts_are_numbered_prompt_by_prompt(prompts: list[Any]) -> None:
    api = make_api()
    long = len(api.ids("A very long prompt"))
    api.engine.script = lambda r: Script(
        api.ids(f"<{len(r.prompt_ids)}>"), delay=0.01 if len(r.prompt_ids) in (3, long) else 0
    )
    texts = [p if isinstance(p, str) else api.text.tokenizer.decode(p) for p in prompts]
    body = api.complete(prompts, n=2, echo=True).json()
    lengths = [len(r.prompt_ids) for r in api.engine.seen]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    expected = [f"{texts[i // 2]}<{lengths[i]}>" for i in range(4)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == lengths[0] + lengths[2]
    options = {"include_usage": True}
    events = events_of(api.complete(prompts, n=2, echo=True, stream=True, stream_options=options))
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"] == body["usage"]
    assert len({event["id"] for event in events}) == 1
    streamed = ["", "", "", ""]
    finishes = []
    for event in events:
        (choice,) = event["choices"]
        assert choice["index"] not in finishes
        streamed[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes.append(choice["index"])
    assert streamed == expected
    assert sorted(finishes) == [0, 1, 2, 3]


def test_too_many_choices_are_refused() -> None:
    api = make_api()
    assert error_of(api.complete(["x"] * 1000))["param"] == "prompt"
    assert error_of(api.complete(["x"] * 65, n=2))["param"] == "prompt"
    assert api.engine.seen == []


def test_log_probabilities_have_openais_shapes() -> None:
    api = make_api()
    api.say("a好", burst=3)
    chat = api.chat(logprobs=True, top_logprobs=2).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == chat["usage"]["completion_tokens"]
    assert content[0]["token"] == "a"
    assert content[0]["bytes"] == [97]
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "a好"
    events = events_of(api.chat(logprobs=True, top_logprobs=2, stream=True))[:-1]
    parts = [e["choices"][0]["logprobs"] for e in events]
    assert [entry for part in parts if part for entry in part["content"]] == content
    text = api.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert text["tokens"][0] == "a"
    assert text["tokens"][1] == "bytes:\\xe5"
    assert text["token_logprobs"][0] == -0.5
    assert text["top_logprobs"][0] == {"a": -0.5}
    assert text["text_offset"][:2] == [0, 1]
    assert error_of(api.complete(logprobs=1, echo=True))["param"] == "logprobs"


def test_metrics_of_a_request_are_added_on_request() -> None:
    api = make_api()
    api.say("abc")
    assert "metrics" not in api.chat().json()["choices"][0]
    metrics = api.chat(metrics=True).json()["choices"][0]["metrics"]
    assert (metrics["queue_seconds"], metrics["drafted_tokens"]) == (0.25, 3)
    assert metrics["total_seconds"] >= metrics["time_to_first_token_seconds"] > 0
    last = events_of(api.chat(metrics=True, stream=True))[-2]
    assert last["choices"][0]["metrics"]["accepted_tokens"] == 2
