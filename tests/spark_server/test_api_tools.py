"""Reasoning and tool calls through the API: a stream and a whole answer say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.spark_server.api_harness import (
    Api,
    error_of,
    events_of,
    make_api,
)
from tests.spark_server.text_fixtures import HERMES_TEMPLATE, text_model

F: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"


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
    assert json.loads(api.last.grammar or "") == F["function"]["parameters"]
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
