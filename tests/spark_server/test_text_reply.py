"""Reasoning, tool calls and the whole reply machine: the same result for every cut and burst."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from spark_server.text.calls import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Text,
    ToolSchemas,
    value_json,
)
from spark_server.text.forced import CallListParser, NamedCallParser, named_schema, required_schema
from spark_server.text.reasoning import ReasoningMode, ReasoningSplitter
from spark_server.text.reply import Piece, Reasoning, Reply
from spark_server.text.tokenizer import Tokenizer
from spark_server.text.toolparser import ToolCallParser
from tests.spark_server.text_fixtures import tokenizer_definition

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "n": {"type": "integer"},
                "o": {"$ref": "#/$defs/O"},
                "b": {"type": ["boolean", "null"]},
            },
            "$defs": {"O": {"type": "object"}},
        },
    },
}
XML = (
    'Sure.\n\n<tool_call>\n<function=f>\n<parameter=city>\nSão "P"\n <b> x\n</parameter>\n'
    '<parameter=n>\n5\n</parameter>\n<parameter=o>\n{"a": [1, true]}\n</parameter>'
    "<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call>"
)
HERMES = (
    '<tool_call>\n{"name": "f", "arguments": {"city": "}\\"{", "n": [{}]}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"a": 1}, "name": "g"}\n</tool_call>'
)


def cuts_of(text: str, rng: random.Random) -> list[str]:
    pieces, position = [], 0
    while position < len(text):
        size = rng.randint(1, 9)
        pieces.append(text[position : position + size])
        position += size
    return pieces


def summary(events: list[Event]) -> tuple[str, list[tuple[str, str, bool]]]:
    """Text, and (name, arguments, complete) of each call."""
    text = "".join(e.text for e in events if isinstance(e, Text))
    calls: list[tuple[str, str, bool]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, "", False))
        elif isinstance(event, CallArguments):
            name, arguments, _ = calls[event.index]
            calls[event.index] = (name, arguments + event.fragment, False)
        elif isinstance(event, CallEnd):
            calls[event.index] = (*calls[event.index][:2], True)
    return text, calls


def parse(
    pieces: list[str], *, complete: bool = True, suppress: bool = False
) -> tuple[str, list[tuple[str, str, bool]]]:
    parser = ToolCallParser(ToolSchemas([TOOL]), bare_functions=True, suppress=suppress)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return summary(events + parser.finish(complete=complete))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            XML,
            "Sure.",
            [
                ("f", {"city": 'São "P"\n <b> x', "n": 5, "o": {"a": [1, True]}, "b": True}),
                ("g", {}),
            ],
        ),
        (HERMES, "", [("f", {"city": '}"{', "n": [{}]}), ("g", {"a": 1})]),
        (
            "<function=f><parameter=city>x\n<parameter=n>\nmany\n</function> bye",
            "bye",
            [("f", {"city": "x", "n": "many"})],
        ),
        ("<tool_call><function=f><parameter=n>7", "", [("f", {"n": 7})]),
        ("x <tool_call>nonsense</tool_call> y", "x <tool_call>nonsense</tool_call> y", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ("a < b and <tool", "a < b and <tool", []),
    ],
)
def test_calls_are_found_in_every_cut(
    text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    rng = random.Random(3)
    for pieces in [[text], list(text), *(cuts_of(text, rng) for _ in range(200))]:
        got_text, got_calls = parse(pieces)
        assert got_text == content
        assert [(name, json.loads(args)) for name, args, _ in got_calls] == calls
        assert all(complete for _, _, complete in got_calls)


@pytest.mark.parametrize("text", [XML, HERMES])
def test_a_call_that_is_cut_is_not_complete_and_leaks_no_markup(text: str) -> None:
    for length in range(text.index("<tool_call>") + 11, text.index("</tool_call>") - 14):
        got_text, calls = parse(list(text[:length]), complete=False)
        assert "<" not in got_text
        assert not any(complete for _, _, complete in calls)


def test_names_come_before_arguments_and_arguments_in_fragments() -> None:
    parser = ToolCallParser(ToolSchemas([TOOL]), bare_functions=True)
    assert parser.feed("<tool_call>\n<function=f>") == [CallStart(0, "f")]
    first = parser.feed("\n<parameter=city>\nPar")
    assert first == [CallArguments(0, '{"city": "'), CallArguments(0, "Par")]
    assert parser.feed("is") == [CallArguments(0, "is")]
    hermes = ToolCallParser(ToolSchemas([TOOL]), bare_functions=False)
    head = hermes.feed('<tool_call>{"name": "f", "arguments": {"city": "Pa')
    assert head == [CallStart(0, "f"), CallArguments(0, '{"city": "Pa')]


@pytest.mark.parametrize("text", [XML, HERMES, "x <tool_call>no</tool_call> y"])
def test_suppressed_calls_leave_neither_call_nor_markup(text: str) -> None:
    expected = parse([text], suppress=True)
    assert parse(list(text), suppress=True) == expected
    assert "tool_call" not in expected[0]
    assert expected[1] == []


@pytest.mark.parametrize(
    ("raw", "types", "expected"),
    [
        ("5", {"integer"}, 5),
        ("1.5", {"number"}, 1.5),
        ("5", {"string"}, "5"),
        ("True", {"boolean"}, True),
        ("null", {"integer", "null"}, None),
        ("null", {"string"}, "null"),
        ("{'a': True}", {"object"}, {"a": True}),
        ("[1, 2]", {"array"}, [1, 2]),
        ("NaN", {"number"}, "NaN"),
        ("five", {"integer"}, "five"),
        ("[" * 5000, {"array"}, "[" * 5000),
    ],
)
def test_values_take_the_type_of_the_schema(raw: str, types: set[str], expected: object) -> None:
    assert json.loads(value_json(raw, frozenset(types))) == expected


def test_types_are_found_behind_references_and_alternatives() -> None:
    schemas = ToolSchemas(
        [
            {
                "function": {
                    "name": "f",
                    "parameters": {
                        "properties": {
                            "loop": {"$ref": "#/properties/loop"},
                            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                            "listed": {"enum": [1, 2]},
                        }
                    },
                }
            }
        ]
    )
    assert schemas.types("f", "loop") == {"string"}
    assert schemas.types("f", "either") == {"integer", "null"}
    assert schemas.types("f", "listed") == {"number"}
    assert schemas.types("f", "unknown") == {"string"}
    assert schemas.types("g", "x") == {"string"}


def split(pieces: list[str], mode: ReasoningMode) -> tuple[str, str]:
    splitter = ReasoningSplitter(mode)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    return (
        "".join(part.text for part in parts if part.reasoning),
        "".join(part.text for part in parts if not part.reasoning),
    )


@pytest.mark.parametrize(
    ("mode", "text", "reasoning", "content"),
    [
        (ReasoningMode.OPEN, "a thought\n</think>\n\nans", "a thought", "ans"),
        (ReasoningMode.OPEN, "cut in the tho", "cut in the tho", ""),
        (ReasoningMode.OPEN, "cut </thi", "cut </thi", ""),
        (ReasoningMode.OPEN, "<think>\nonce more\n</think>\n\nx", "once more", "x"),
        (ReasoningMode.OPEN, "\n\n</think>\n\nans", "", "ans"),
        (ReasoningMode.OPEN, "a</think>b</think>c<think>d</think>e", "ad", "bce"),
        (ReasoningMode.OPEN, "think<tool_call>x", "think", "<tool_call>x"),
        (ReasoningMode.CLOSED, "a <b> c", "", "a <b> c"),
        (ReasoningMode.CLOSED, "<think>\nhidden\n</think>\n\nans", "", "ans"),
        (ReasoningMode.AUTO, "<think>\nown\n</think>\n\nans", "own", "ans"),
        (ReasoningMode.NONE, "<think>text</think>", "", "<think>text</think>"),
    ],
)
def test_thoughts_and_content_are_told_apart_in_every_cut(
    mode: ReasoningMode, text: str, reasoning: str, content: str
) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert split(pieces, mode) == (reasoning, content)


def reply_of(tokenizer: Tokenizer, text: str, bursts: list[int], **options: Any) -> Any:
    reply = Reply(tokenizer.detokenizer(), **options)
    ids, position = tokenizer.encode(text), 0
    pieces: list[Piece] = []
    done = False
    while position < len(ids) and not done:
        size = bursts.pop(0) if bursts else len(ids)
        fed = reply.feed(ids[position : position + size])
        pieces += fed.pieces
        position += fed.consumed
        done = fed.done
    tail, finish = reply.finish(cut=not done)
    pieces += tail
    reasoning = "".join(p.text for p in pieces if isinstance(p, Reasoning))
    events = [p for p in pieces if not isinstance(p, Reasoning)]
    return (reasoning, *summary(events), finish, reply.tokens)


def test_bursts_change_nothing_in_the_whole_machine() -> None:
    tokenizer = Tokenizer(tokenizer_definition())
    text = "thinking 你好\n</think>\n\nSure.\n\n" + XML + "\n\nSTOP here"
    rng = random.Random(5)

    def run(bursts: list[int]) -> Any:
        return reply_of(
            tokenizer,
            text,
            bursts,
            stops=["STOP", "NEVER"],
            reasoning=ReasoningMode.OPEN,
            parser=ToolCallParser(ToolSchemas([TOOL]), bare_functions=True),
        )

    expected = run([])
    assert expected[0] == "thinking 你好"
    assert [call[0] for call in expected[2]] == ["f", "g"]
    assert expected[3] == "tool_calls"
    assert expected[4] == len(tokenizer.encode(text[: text.index("STOP") + 4]))
    for _ in range(100):
        assert run([rng.randint(1, 6) for _ in range(600)]) == expected


def test_one_call_ends_the_reply() -> None:
    tokenizer = Tokenizer(tokenizer_definition())
    parser = ToolCallParser(ToolSchemas([TOOL]), bare_functions=True)
    result = reply_of(tokenizer, XML, [], parser=parser, one_call=True)
    assert [call[0] for call in result[2]] == ["f"]
    assert result[3] == "tool_calls"
    assert result[4] < len(tokenizer.encode(XML))


def test_min_tokens_wins_over_stop_strings() -> None:
    tokenizer = Tokenizer(tokenizer_definition())
    text = "xSxxS and on"
    result = reply_of(tokenizer, text, [], stops=["S"], min_tokens=3)
    assert result[1:2] + result[3:] == ("xSxx", "stop", 5)


def test_a_stop_id_counts_but_has_no_text() -> None:
    tokenizer = Tokenizer(tokenizer_definition())
    reply = Reply(tokenizer.detokenizer())
    fed = reply.feed(tokenizer.encode("ok!"), hidden_last=True)
    assert (fed.pieces, fed.consumed, reply.tokens) == ([Text("ok")], 3, 3)
    assert reply.finish(cut=False) == ([], "stop")


def test_a_held_back_tail_still_passes_the_stop_strings() -> None:
    # The incomplete character is released at the end, and U+FFFD is the stop string.
    tokenizer = Tokenizer(tokenizer_definition())
    reply = Reply(tokenizer.detokenizer(), stops=["\ufffd"])
    fed = reply.feed(tokenizer.encode("a好")[:2])
    assert fed.pieces == [Text("a")]
    assert reply.finish(cut=True) == ([], "stop")


def test_forced_calls_are_read_from_plain_json() -> None:
    named = NamedCallParser("f")
    events = named.feed(" \n") + named.feed('{"city"') + named.feed(': "x"}')
    assert summary(events + named.finish(complete=True)) == ("", [("f", '{"city": "x"}', True)])
    calls = CallListParser()
    text = '[{"name": "f", "parameters": {"n": 1}}, {"name": "g", "parameters": {}}]'
    events = [event for char in text for event in calls.feed(char)]
    assert summary(events) == ("", [("f", '{"n": 1}', True), ("g", "{}", True)])


def test_forcing_schemas_hold_the_tools() -> None:
    empty = {"type": "function", "function": {"name": "e", "parameters": {"properties": {}}}}
    assert json.loads(named_schema(empty))["additionalProperties"] is False
    schema = json.loads(required_schema([TOOL, empty], parallel=False))
    assert schema["maxItems"] == 1
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["f", "e"]


def test_references_inside_a_tool_follow_it_into_the_list() -> None:
    parameters = {
        "type": "object",
        "$defs": {"S": {"enum": ["a"]}},
        "properties": {"s": {"$ref": "#/$defs/S"}, "again": {"anyOf": [{"$ref": "#"}]}},
    }
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    schema = json.loads(required_schema([TOOL, tool], parallel=True))
    places = [call["properties"]["parameters"]["$ref"] for call in schema["items"]["anyOf"]]
    assert places == ["#/$defs/0", "#/$defs/1"]
    moved = schema["$defs"]["1"]
    assert moved["properties"]["s"] == {"$ref": "#/$defs/1/$defs/S"}
    assert moved["properties"]["again"] == {"anyOf": [{"$ref": "#/$defs/1"}]}
    assert moved["$defs"] == parameters["$defs"]
