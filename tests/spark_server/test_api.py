"""Every route in process over a fake engine: shapes, statuses, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import EngineUnavailableError, QueueFullError
from engine.request import GenerationRequest
from spark_server.api import ApiOptions
from spark_server.engine_api import Endpoint, EngineState, Outcome
from tests.spark_server.api_harness import (
    CONTEXT,
    VOCABULARY,
    Api,
    error_of,
    events_of,
    make_api,
)
from tests.spark_server.fake_engine import Script
from tests.spark_server.text_fixtures import HERMES_TEMPLATE, added_id, text_model

FAMILY = "👩‍👩‍👧‍👦🇯🇵你好 “x”"
F: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"


def told(api: Api) -> GenerationRequest:
    """The last request that the engine got."""
    return api.engine.seen[-1]


# -- streams --------------------------------------------------------------------------------


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
    assert whole["usage"]["prompt_tokens"] == len(told(api).prompt_ids)


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
    assert told(api).sampling.max_tokens == (room if expected is None else expected)


def test_the_operators_ceiling_bounds_every_request() -> None:
    api = make_api(options=ApiOptions(max_output_tokens=6))
    for fields in ({}, {"max_tokens": 100}):
        api.chat(**fields)
        assert told(api).sampling.max_tokens == 6
    api.complete()
    assert told(api).sampling.max_tokens == 6
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
    request = told(api)
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
    first = told(api).sampling
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    api.chat(top_k=-1, temperature=1e-4)
    second = told(api).sampling
    assert (second.top_k, second.temperature) == (0, 0.0)
    assert first.seed != second.seed


def test_choices_have_seeds_of_their_own_that_do_not_depend_on_the_prompt() -> None:
    api = make_api()
    api.complete(["a", "b"], n=3, seed=5)
    seeds = [request.sampling.seed for request in api.engine.seen]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


# -- completions --------------------------------------------------------------------------------


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


# -- reasoning and tools ------------------------------------------------------------------


def joined(events: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas make, and its finish reason."""
    message: dict[str, Any] = {}
    finish = ""
    for event in events[:-1]:
        choice = event["choices"][0]
        finish = choice["finish_reason"] or finish
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
                continue
            for call in value:
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"type": call["type"], "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, finish


def both(api: Api, **fields: Any) -> tuple[dict[str, Any], str]:
    """Message and finish reason, after checking that a stream gives the same."""
    choice = api.chat(**fields).json()["choices"][0]
    message = dict(choice["message"])
    streamed, finish = joined(events_of(api.chat(stream=True, **fields)))
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    assert (message["content"] or "") == streamed.pop("content")
    assert {k: v for k, v in message.items() if k != "content"} == streamed
    assert choice["finish_reason"] == finish
    return message, finish


def test_a_thought_is_told_from_the_answer() -> None:
    api = make_api()
    api.say("I think\n</think>\n\nanswer", burst=2)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message, finish = both(api, **thinking)
    assert message["reasoning_content"] == "I think"
    assert (message["content"], finish) == ("answer", "stop")
    message, finish = both(api, max_tokens=4, **thinking)
    assert message["reasoning_content"] == "I thin"
    assert (message["content"], finish) == (None, "length")
    api.say("answer")
    message, finish = both(api)
    assert message == {"role": "assistant", "content": "answer"}


def test_calls_are_reported_with_their_finish_reason() -> None:
    api = make_api()
    api.say("Sure.\n\n" + CALL + "\n" + CALL.replace("5", "6"), burst=3)
    message, finish = both(api, tools=[F])
    assert message["content"] == "Sure."
    arguments = [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]]
    assert arguments == [{"n": 5}, {"n": 6}]
    assert finish == "tool_calls"
    message, finish = both(api, tools=[F], parallel_tool_calls=False)
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f"]
    assert finish == "tool_calls"
    message, finish = both(api, tools=[F], max_tokens=40)
    assert finish == "length"
    message, finish = both(api, tools=[F], tool_choice="none")
    assert message == {"role": "assistant", "content": "Sure."}
    assert finish == "stop"
    message, finish = both(api)
    assert CALL in message["content"]


def test_the_hermes_dialect_works_too() -> None:
    api = make_api(text=text_model(HERMES_TEMPLATE))
    api.say('<tool_call>\n{"name": "f", "arguments": {"n": 5}}\n</tool_call>')
    message, finish = both(api, tools=[F])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"n": 5}'}
    assert finish == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_calls_without_a_grammar_are_refused_before_the_stream(
    choice: Any, stream: bool
) -> None:
    response = make_api().chat(tools=[F], tool_choice=choice, stream=stream)
    assert response.status_code == 400
    assert error_of(response)["param"] == "tool_choice"


def test_forced_calls_and_formats_use_the_engines_grammar() -> None:
    api = make_api(grammar=True)
    api.say('{"n": 5}')
    named = {"type": "function", "function": {"name": "f"}}
    message, finish = both(api, tools=[F], tool_choice=named)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"n": 5}'}
    assert finish == "stop"
    assert json.loads(told(api).grammar or "") == F["function"]["parameters"]
    api.say('[{"name": "f", "parameters": {"n": 5}}]')
    message, finish = both(api, tools=[F], tool_choice="required")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"n": 5}'}
    assert finish == "tool_calls"
    api.say('{"a": "<tool_call>"}')
    message, finish = both(api, response_format={"type": "json_object"})
    assert (message["content"], finish) == ('{"a": "<tool_call>"}', "stop")
    both_forced = api.chat(
        tools=[F], tool_choice="required", response_format={"type": "json_object"}
    )
    assert error_of(both_forced)["param"] == "response_format"


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [Endpoint.CHAT, Endpoint.COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", [b"[]", b"null", b"123", b"{", b"", b"\xff", b'{"a":1,"a":2}'])
def test_bodies_that_are_no_object_are_the_clients_mistake(path: str, raw: bytes) -> None:
    response = make_api().call("POST", path, raw=raw)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_wrong_paths_methods_and_models_use_the_same_envelope() -> None:
    api = make_api()
    assert error_of(api.call("GET", "/nope"))["code"] == "not_found"
    assert error_of(api.call("GET", "/v1/models/"))["code"] in ("not_found", "model_not_found")
    wrong = api.call("GET", Endpoint.CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert error_of(wrong)["code"] == "method_not_allowed"
    for response in (
        api.chat(model="nope"),
        api.complete(model="nope"),
        api.call("GET", "/v1/models/a/b"),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
        assert error_of(response)["param"] == "model"


def test_a_body_above_the_limit_is_413() -> None:
    api = make_api(options=ApiOptions(max_body_bytes=200))
    response = api.chat("x" * 300)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert api.chat("x").status_code == 200


def test_template_attacks_in_a_request_are_refused() -> None:
    api = make_api()
    assert error_of(api.chat(chat_template="{{ 1 }}"))["param"] == "chat_template"
    for name in ("chat_template", "messages", "tools", "add_generation_prompt", "bos_token", "_x"):
        error = error_of(api.chat(chat_template_kwargs={name: "x"}))
        assert error["param"] == "chat_template_kwargs"
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    assert error_of(api.chat(chat_template_kwargs={"a": deep}))["param"] == "chat_template_kwargs"
    assert api.engine.seen == []


@pytest.mark.parametrize("stream", [True, False])
def test_refusals_of_the_engine_keep_their_status(stream: bool) -> None:
    api = make_api()
    api.engine.script = lambda r: Script(refuse=QueueFullError("64 wait already", retry_after=3))
    response = api.chat(stream=stream, n=2)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert error_of(response)["code"] == "queue_full"
    api.engine.script = lambda r: Script(refuse=EngineUnavailableError("it restarts"))
    response = api.chat(stream=stream)
    assert response.status_code == 503
    assert error_of(response)["type"] == "server_error"
    assert set(api.observer.outcomes) <= {Outcome.REJECTED, Outcome.UNAVAILABLE, Outcome.ABORT}
    assert api.observer.open == set()


def test_a_failure_after_the_first_token_ends_the_stream_with_an_error_event() -> None:
    api = make_api()
    api.say("abcdef", fail_after=3)
    events = events_of(api.chat(stream=True))
    assert events[-1]["error"]["message"] == "the engine process ended"
    assert "[DONE]" not in events
    response = api.chat()
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_error"
    assert api.observer.outcomes == [Outcome.ERROR, Outcome.ERROR]


def test_an_unexpected_exception_is_a_500_in_the_envelope() -> None:
    api = make_api()
    api.engine.script = lambda r: Script(refuse=ZeroDivisionError("secret"))
    response = api.chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["code"] == "internal_error"
    assert api.observer.outcomes == [Outcome.ERROR]


# -- keys, ids and the small routes --------------------------------------------------------


def test_keys_are_asked_for_everywhere_but_on_health_and_ready() -> None:
    api = make_api(options=ApiOptions(api_keys=("one", "zwö")))
    for path in ("/v1/models", "/metrics", "/version", "/debug/ledger", "/docs", "/nope"):
        refused = api.call("GET", path)
        assert refused.status_code == 401
        assert error_of(refused)["code"] == "invalid_api_key"
    for path in ("/health", "/ready"):
        assert api.call("GET", path).status_code == 200
    for key, status in (("one", 200), ("zwö", 200), ("on", 401), ("", 401), ("one two", 401)):
        header = {"Authorization": f"Bearer {key}".encode()}
        assert api.call("GET", "/v1/models", headers=header).status_code == status  # type: ignore[arg-type]
    assert api.call("GET", "/v1/models", headers={"Authorization": "one"}).status_code == 401


@pytest.mark.parametrize("given", ["dup", "a" * 5000, 'x"y', "\x1b[31m", ""])
def test_request_ids_are_echoed_only_when_harmless(given: str) -> None:
    response = make_api().call("GET", "/health", headers={"X-Request-Id": given})
    echoed = response.headers.get_list("x-request-id")
    assert len(echoed) == 1
    assert (echoed[0] == given) == (given == "dup")
    assert len(echoed[0]) <= 128


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        (EngineState.READY, 200, 200),
        (EngineState.LOADING, 200, 503),
        (EngineState.DRAINING, 200, 503),
        (EngineState.DEAD, 503, 503),
        (EngineState.STUCK, 503, 503),
    ],
)
def test_health_and_readiness_differ(state: EngineState, health: int, ready: int) -> None:
    api = make_api()
    api.engine.now, api.engine.stalled = state, 12.5
    assert api.call("GET", "/health").status_code == health
    response = api.call("GET", "/ready")
    assert response.status_code == ready
    assert response.json() == {"status": state.value, "seconds_without_progress": 12.5}
    chat = api.chat()
    assert chat.status_code == ready
    if ready != 200:
        assert error_of(chat)["code"] == "engine_unavailable"
        assert "retry-after" in chat.headers
        assert api.observer.outcomes == [Outcome.UNAVAILABLE]


def test_models_are_listed_with_their_true_limits() -> None:
    api = make_api(options=ApiOptions(served_names=("alias/x",)))
    data = api.call("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in data] == ["tiny", "alias/x"]
    assert (data[0]["max_model_len"], data[0]["max_batch_size"]) == (CONTEXT, 8)
    assert api.call("GET", "/v1/models/alias/x").json()["root"] == "tiny"
    assert api.chat(model="alias/x").json()["model"] == "alias/x"
    api.engine.model = None
    assert api.call("GET", "/v1/models").status_code == 503


def test_tokenize_and_detokenize_are_inverse() -> None:
    api = make_api()
    text = "a<|im_end|>你好"
    ids = api.call("POST", "/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"])
    assert ids["max_model_len"] == CONTEXT
    assert added_id("<|im_end|>") in ids["tokens"]
    assert api.call("POST", "/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = api.call("POST", "/tokenize", chat).json()["tokens"]
    api.chat("hi")
    assert tuple(tokens) == told(api).prompt_ids
    assert error_of(api.call("POST", "/tokenize", {}))["param"] == "prompt"
    assert error_of(api.call("POST", "/detokenize", {"tokens": [VOCABULARY]}))["param"] == "tokens"


def test_the_small_pages() -> None:
    api = make_api()
    assert "version" in api.call("GET", "/version").json()
    page = api.call("GET", "/metrics", headers={"Accept": "text/x"})
    assert (page.text, page.headers["content-type"]) == ("# text/x\n", "text/plain; version=0.0.4")
    assert api.call("GET", "/debug/ledger").status_code == 503
    api.engine.table = {"terms": []}
    assert api.call("GET", "/debug/ledger").json() == {"terms": []}
    paths = api.call("GET", "/openapi.json").json()["paths"]
    schema = paths[Endpoint.CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "max_completion_tokens" in schema["properties"]


def test_what_the_observer_is_told_adds_up() -> None:
    api = make_api()
    api.say("abcdef", burst=2)
    api.chat(n=2)
    api.complete(["a", "b"], stream=True)
    api.chat(stop="c")
    api.chat(temperature=-1)
    assert api.observer.open == set()
    assert api.observer.starts == len(api.observer.outcomes) == 6
    counts = [tokens for _, _, _, tokens in api.observer.finished]
    assert counts == [7, 7, 7, 7, 3, 0]
    assert api.observer.outcomes == [Outcome.STOP] * 5 + [Outcome.REJECTED]
