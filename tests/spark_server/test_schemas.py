"""Bodies, messages, tools and sampling fields: what is taken, and what is refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from engine.errors import RequestError
from spark_server.api.body import parse_object
from spark_server.api.messages import normalise_messages
from spark_server.api.sampling import choice_seed
from spark_server.api.schemas import ChatBody, CompletionBody, validate
from spark_server.api.tools import Choice, output_grammar, plan_tools
from tests.spark_server.text_fixtures import text_model

USER = {"role": "user", "content": "u"}
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def param_of(call: Any, *args: Any, **kwargs: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"[]", None),
        (b"true", None),
        (b"null", None),
        (b"123", None),
        (b'"x"', None),
        (b"{", None),
        (b"", None),
        (b'{"a": "\xff"}', None),
        (b'{"n": 1, "n": 2}', "n"),
        (b'{"a": {"k": 1, "k": 1}}', "k"),
        (b'{"temperature": NaN}', "temperature"),
        (b'{"top_p": -Infinity}', "top_p"),
        (b'{"min_p": 1e999}', "min_p"),
        (b'{"logit_bias": {"5": Infinity}}', "logit_bias"),
        (b'{"user": "\\ud800"}', "user"),
        (b'{"a":' * 100000, None),
        (b"[" * 100000, None),
        (b'{"seed": ' + b"9" * 5000 + b"}", None),
    ],
)
def test_bodies_that_are_refused(data: bytes, param: str | None) -> None:
    assert param_of(parse_object, data) == param


def test_bodies_that_are_taken() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00", "b": [1.5, null]}') == {
        "a": "😀",
        "b": [1.5, None],
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("max_tokens",) for value in (0, -1, "5", 2.5, True)],
        ("max_completion_tokens", 0),
        *[("temperature", value) for value in (-1, 999999, "nan", "0.5", True, [0.5])],
        *[("top_p", value) for value in (0, -1, 2, "1")],
        *[("top_k", value) for value in (0.01, -2, "5", True)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("presence_penalty", value) for value in (-2.1, 3, "x")],
        *[("frequency_penalty", value) for value in (-2.1, 3)],
        *[("repetition_penalty", value) for value in (0, -1, 11, "1")],
        *[("logit_bias", value) for value in ({"5": 101}, {"5": "x"}, {"5": True}, [1], "x")],
        *[("n", value) for value in (0, -1, 1.5, True)],
        *[("stream", value) for value in (1, "true")],
        *[("seed", value) for value in (1.5, "1", 2**64, True)],
        ("top_logprobs", 21),
        ("logprobs", 5),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", ["1"]),
        ("min_tokens", -1),
        ("priority", "high"),
        ("user", 5),
        ("model", 5),
        ("ignore_eos", 1),
        ("parallel_tool_calls", "no"),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object) -> None:
    assert param_of(validate, ChatBody, {field: value}) == field


def test_stream_options_name_their_member() -> None:
    body = {"stream_options": {"include_usage": "yes"}}
    assert param_of(validate, ChatBody, body) == "stream_options.include_usage"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("function_call", "auto"),
        ("functions", [{}]),
        ("suffix", "x"),
        ("best_of", 2),
        ("best_of", True),
        ("chat_template", "{{ x }}"),
        ("store", True),
        ("guided_json", {}),
        ("echo", None),
    ],
)
def test_known_but_unsupported_fields_are_refused_by_name(field: str, value: object) -> None:
    if value is None:
        validate(ChatBody, {field: value})
    else:
        assert param_of(validate, ChatBody, {field: value}) == field


def test_unsupported_fields_that_ask_for_nothing_are_taken() -> None:
    validate(
        CompletionBody,
        {"best_of": 1, "suffix": None, "store": False, "service_tier": "auto", "n": None},
    )


def test_unknown_fields_give_one_warning_of_one_line(caplog: pytest.LogCaptureFixture) -> None:
    data = {"zzz": 1, "evil\nline\x1b[0m": 2, "x" * 5000: 3, **{f"k{i}": 0 for i in range(50)}}
    with caplog.at_level(logging.WARNING, "spark_server.api"):
        validate(ChatBody, data)
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert "zzz" in text
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 2000


def rendered(messages: list[dict[str, Any]]) -> str:
    return text_model().render_chat(normalise_messages(messages), None, {}).text


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([system("a"), system("b"), USER], [system("a\n\nb"), USER]),
        ([USER, system("a"), USER], [system("a"), USER, USER]),
        ([{"role": "developer", "content": "a"}, USER], [system("a"), USER]),
        ([system("a"), {"role": "developer", "content": "b"}, USER], [system("a\n\nb"), USER]),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ],
            [{"role": "user", "content": "ab"}],
        ),
        (
            [USER, {"role": "assistant", "content": None}],
            [USER, {"role": "assistant", "content": ""}],
        ),
        (
            [USER, {"role": "assistant", "content": "<think>\nt\n</think>\n\na"}],
            [USER, {"role": "assistant", "content": "a", "reasoning_content": "t"}],
        ),
    ],
)
def test_message_lists_that_mean_the_same_render_the_same(
    messages: list[dict[str, Any]], same: list[dict[str, Any]]
) -> None:
    assert rendered(messages) == rendered(same)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ("x", "messages[0]"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "zzz"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_wrong_messages_are_refused_by_name(message: object, param: str) -> None:
    assert param_of(normalise_messages, [message]) == param


@pytest.mark.parametrize("messages", [None, [], {}, "x", 5])
def test_messages_must_be_a_list_with_something_in_it(messages: object) -> None:
    assert param_of(normalise_messages, messages) == "messages"


def turn(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "unknown", "content": [{"type": "text", "text": "18C"}]},
    ]


@pytest.mark.parametrize(
    ("arguments", "mapping"),
    [
        ('{"city": "Zürich", "n": {"a": [1]}}', {"city": "Zürich", "n": {"a": [1]}}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("", {}),
        ("{}", {}),
        ("null", {}),
        (None, {}),
    ],
)
def test_arguments_on_the_wire_are_a_mapping_in_the_template(
    arguments: object, mapping: dict[str, Any]
) -> None:
    text = rendered(turn(arguments))
    assert text == rendered(turn(mapping))
    assert "<function=f>" in text
    assert "\\u" not in text
    if "city" in mapping:
        assert f"<parameter=city>\n{mapping['city']}\n</parameter>" in text


@pytest.mark.parametrize("arguments", ["[1]", "{bad", "5", '"x"', 5, [1], '{"a": NaN}'])
def test_arguments_that_are_no_object_are_refused_by_name(arguments: object) -> None:
    where = "messages[1].tool_calls[0].function.arguments"
    assert param_of(normalise_messages, turn(arguments)) == where


@pytest.mark.parametrize("tools", [None, [], [F]])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_free_choices_need_no_grammar(tools: Any, choice: Any) -> None:
    plan = plan_tools(tools, choice, parallel=True, grammar=False)
    assert plan.grammar is None
    assert plan.suppress == (choice == "none")
    assert len(plan.tools) == (0 if choice == "none" else len(tools or []))


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_choices_need_tools_and_a_grammar(choice: Any) -> None:
    for tools in (None, []):
        assert param_of(plan_tools, tools, choice, parallel=True, grammar=True) == "tool_choice"
    assert param_of(plan_tools, [F], choice, parallel=True, grammar=False) == "tool_choice"
    plan = plan_tools([F], choice, parallel=True, grammar=True)
    assert plan.grammar is not None
    assert plan.choice is (Choice.REQUIRED if choice == "required" else Choice.NAMED)


@pytest.mark.parametrize(
    "choice",
    [
        "zzz",
        5,
        {},
        {"type": "function"},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": "g"}},
    ],
)
def test_choices_that_name_nothing_are_refused(choice: Any) -> None:
    assert param_of(plan_tools, [F], choice, parallel=True, grammar=True) == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([{}], "tools[0]"),
        ([{"type": "zzz", "function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([F, F], "tools[1].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
            "tools[0].function.parameters",
        ),
        ([F] * 513, "tools"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: Any, param: str) -> None:
    assert param_of(plan_tools, tools, None, parallel=True, grammar=True) == param


@pytest.mark.parametrize(
    "value",
    [
        "json",
        {},
        {"type": "zzz"},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": {}},
        {"type": "json_schema", "json_schema": "{}"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
    ],
)
def test_malformed_output_formats_are_refused(value: Any) -> None:
    assert param_of(output_grammar, value, grammar=True) == "response_format"


def test_output_formats_become_a_schema_or_are_refused() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
    assert output_grammar(None, grammar=False) is None
    assert output_grammar({"type": "text"}, grammar=False) is None
    assert json.loads(output_grammar(schema, grammar=True) or "") == {"type": "array"}
    assert output_grammar({"type": "json_object"}, grammar=True) == '{"type": "object"}'
    assert param_of(output_grammar, schema, grammar=False) == "response_format"
    deep: dict[str, Any] = {}
    for _ in range(10000):
        deep = {"properties": {"a": deep}}
    schema["json_schema"] = {"name": "a", "schema": deep}
    assert param_of(output_grammar, schema, grammar=True) == "response_format"


def test_seeds_of_choices_differ_and_the_first_is_the_requests_own() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(-1, 0) == 2**64 - 1
    seeds = {choice_seed(seed, k) for seed in range(20) for k in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**64 for seed in seeds)
