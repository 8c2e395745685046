"""Streams, lengths, ids and sampling fields in process: shapes, and what the engine gets."""

from __future__ import annotations

from typing import Any

import pytest

from spark_server.api import ApiOptions
from spark_server.engine_api import Outcome
from tests.spark_server.api_harness import (
    CONTEXT,
    VOCABULARY,
    error_of,
    events_of,
    make_api,
)
from tests.spark_server.text_fixtures import text_model

FAMILY = "👩‍👩‍👧‍👦🇯🇵你好 “x”"


@pytest.mark.parametrize("include", [True, False, None])
def test_a_stream_has_the_shape_that_clients_expect(include: bool | None) -> None:
    api = make_api()
    api.say("Say hi", burst=2)
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    whole = api.chat(n=2, max_tokens=5).json()
    events = events_of(api.chat(n=2, max_tokens=5, stream=True, **options))
    assert events.pop() == "[DONE]"
    usage = events.pop() if include else None
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all(event.get("usage") is None for event in events)
    assert all(len(event["choices"]) == 1 for event in events)
    for index in (0, 1):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in choices[1:])
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][index]["message"]["content"] == "Say h"
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert usage["usage"]["completion_tokens"] == 10
    assert whole["usage"]["prompt_tokens"] == len(api.last.prompt_ids)


def test_stream_options_need_a_stream() -> None:
    error = error_of(make_api().chat(stream_options={"include_usage": True}))
    assert error["param"] == "stream_options"


@pytest.mark.parametrize("burst", [1, 2, 3, 5])
def test_streamed_text_is_the_whole_text_without_broken_characters(burst: int) -> None:
    api = make_api()
    api.say(FAMILY, burst=burst)
    for limit in (400, 9, 2):
        whole = api.chat(max_tokens=limit).json()["choices"][0]
        events = events_of(api.chat(max_tokens=limit, stream=True))[:-1]
        pieces = [e["choices"][0]["delta"].get("content", "") for e in events]
        assert "".join(pieces) == whole["message"]["content"]
        assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
        if limit == 400:
            assert "".join(pieces) == FAMILY
            assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("stop", "text", "finish"),
    [
        ("DEFG", "ABC", "stop"),
        (["H", "EF"], "ABCD", "stop"),
        (["zz", "DEX"], "ABCDEFGH", "stop"),
        ([], "ABCDEFGH", "stop"),
        (None, "ABCDEFGH", "stop"),
        ("hi", "ABCDEFGH", "stop"),  # stands in the prompt only
    ],
)
def test_stop_strings_end_the_text_and_never_leak(stop: Any, text: str, finish: str) -> None:
    api = make_api()
    for burst in (1, 3):
        api.say("ABCDEFGH", burst=burst)
        choice = api.complete(stop=stop, max_tokens=40).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, finish)
        events = events_of(api.complete(stop=stop, max_tokens=40, stream=True))[:-1]
        assert "".join(e["choices"][0]["text"] for e in events) == text
        assert events[-1]["choices"][0]["finish_reason"] == finish
    if text != "ABCDEFGH":
        assert len(api.engine.aborted) >= 2  # the engine is told to stop


@pytest.mark.parametrize("stop", ["", [""], 5, ["x", 5], ["x"] * 17, "y" * 1025, {}])
def test_wrong_stop_strings_are_refused(stop: Any) -> None:
    assert error_of(make_api().chat(stop=stop))["param"] == "stop"


# -- lengths, ids and other sampling fields ------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 3, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 100_000_000}, None),
        ({}, None),
    ],
)
def test_the_length_that_is_asked_for_is_the_length_that_comes(
    fields: dict[str, int], expected: int | None
) -> None:
    api = make_api()
    api.say("", fill=65, burst=4)
    body = api.chat(ignore_eos=True, **fields).json()
    room = CONTEXT - body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == (room if expected is None else expected)
    assert body["choices"][0]["finish_reason"] == "length"
    assert api.last.sampling.max_tokens == (room if expected is None else expected)


def test_the_operators_ceiling_bounds_every_request() -> None:
    api = make_api(options=ApiOptions(max_output_tokens=6))
    for fields in ({}, {"max_tokens": 100}):
        api.chat(**fields)
        assert api.last.sampling.max_tokens == 6
    api.complete()
    assert api.last.sampling.max_tokens == 6
    assert make_api().complete().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_fills_the_context_is_refused_before_the_stream(stream: bool) -> None:
    api = make_api(context=64)
    for size in (64, 65, 64 * 50):
        for prompt in ([65] * size, "A" * size):
            response = api.complete(prompt, stream=stream)
            assert response.status_code == 400
            error = error_of(response)
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == "prompt"
            assert str(size) in error["message"]
            assert "64" in error["message"]
    assert error_of(api.chat("A" * 64))["code"] == "context_length_exceeded"
    assert api.engine.seen == []
    api.say("more", fill=65)
    body = api.complete([65] * 63, max_tokens=9, stream=False).json()
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "prompt",
    [
        [VOCABULARY],
        [-1],
        [[1, 2], [VOCABULARY]],
        [4294967295],
        [1.5],
        [True],
        [],
        [[]],
        "",
        [""],
        ["a", [1]],
        ["a", 1],
        {},
        5,
        None,
        [None],
        [[1], ["a"]],
    ],
)
def test_prompts_that_are_none_are_refused_before_any_work(prompt: Any) -> None:
    api = make_api()
    response = api.complete(prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"
    assert api.engine.seen == []


def test_every_id_of_the_padded_vocabulary_is_taken() -> None:
    api = make_api()
    api.say("ok")
    assert api.complete([VOCABULARY - 1]).json()["choices"][0]["text"] == "ok"


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(VOCABULARY): -100}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"\u0665": 1}},
        {"stop_token_ids": [VOCABULARY], "min_tokens": 4},
        {"stop_token_ids": [-1]},
        {"min_tokens": 9, "max_tokens": 8},
        {"top_logprobs": 3},
        {"n": 129},
    ],
)
def test_fields_that_cannot_work_are_refused_by_name(fields: dict[str, Any]) -> None:
    api = make_api()
    assert error_of(api.chat(**fields))["param"] == next(iter(fields))
    assert api.engine.seen == []
    assert api.observer.outcomes == [Outcome.REJECTED]


def test_everything_that_is_accepted_reaches_the_engine() -> None:
    api = make_api(options=ApiOptions(queue_timeout=30.0))
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "seed": 9,
        "min_tokens": 2,
        "max_tokens": 8,
        "stop_token_ids": [70, 70],
        "ignore_eos": True,
        "priority": -3,
        "user": "u",
        "metadata": {"a": "b"},
    }
    assert api.chat(**fields, logprobs=True, top_logprobs=2).status_code == 200
    request = api.last
    params = request.sampling
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "seed",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
    ):
        assert getattr(params, name) == fields[name], name
    assert params.logit_bias == ((5, -100.0),)
    assert params.stop_token_ids == (70,)
    assert params.logprobs == 2
    assert (request.priority, request.deadline) == (-3, 30.0)


def test_what_is_not_said_is_the_models_default() -> None:
    text = text_model()
    api = make_api(text=text)
    api.chat()
    first = api.last.sampling
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    api.chat(top_k=-1, temperature=1e-4)
    second = api.last.sampling
    assert (second.top_k, second.temperature) == (0, 0.0)
    assert first.seed != second.seed


def test_choices_have_seeds_of_their_own_that_do_not_depend_on_the_prompt() -> None:
    api = make_api()
    api.complete(["a", "b"], n=3, seed=5)
    seeds = [request.sampling.seed for request in api.engine.seen]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
