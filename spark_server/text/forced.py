"""Tool calls whose shape a grammar forces: the reply is JSON alone, without markup.

A named function's reply is its arguments; a required call's reply is a list of
`{"name": ..., "parameters": {...}}`. Also makes the JSON schemas that force them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spark_server.text.calls import CallArguments, CallEnd, CallStart, Event

_EMPTY_OBJECT: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def named_schema(tool: Mapping[str, Any]) -> str:
    """JSON schema text of one function's arguments."""
    parameters = tool["function"].get("parameters") or _EMPTY_OBJECT
    if parameters.get("properties") == {}:
        parameters = _EMPTY_OBJECT  # else a grammar may allow white space without end
    return json.dumps(parameters, ensure_ascii=False)


def required_schema(tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
    """JSON schema text of a list of at least one call of the declared functions."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "parameters": {"$ref": f"#/$defs/{number}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    schema["$defs"] = {
        str(number): _moved(json.loads(named_schema(tool)), f"#/$defs/{number}")
        for number, tool in enumerate(tools)
    }
    if not parallel:
        schema["maxItems"] = 1
    return json.dumps(schema, ensure_ascii=False)


def _moved(node: Any, place: str) -> Any:
    """A schema whose references start at `place`, where its root is moved to."""
    if isinstance(node, list):
        return [_moved(child, place) for child in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(child, place) for key, child in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class NamedCallParser:
    """The whole reply is the arguments of one known function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Event]:
        """Events that became certain with `text`."""
        if not self._started:
            text = text.lstrip()
            if not text:
                return []
        start: list[Event] = [] if self._started else [CallStart(0, self._name)]
        self._started = True
        return [*start, CallArguments(0, text)] if text else start

    def finish(self, *, complete: bool) -> list[Event]:
        """The call ends with the reply, unless the reply was cut."""
        return [CallEnd(0)] if self._started and complete else []


class CallListParser:
    """The reply is a JSON list of calls; each is reported when it is complete."""

    def __init__(self) -> None:
        self._buffer = ""
        self._calls = 0
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> list[Event]:
        """Events that became certain with `text`."""
        self._buffer += text
        return list(self._walk()) if "}" in text else []

    def finish(self, *, complete: bool) -> list[Event]:
        """Nothing is held back that could still become a call."""
        return []

    def _walk(self) -> Iterator[Event]:
        while True:
            body = self._buffer.lstrip(" \t\r\n[,")
            try:
                call, end = self._decoder.raw_decode(body)
            except ValueError:
                return
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return
            self._buffer = body[end:]
            yield CallStart(self._calls, call["name"])
            arguments = json.dumps(call.get("parameters") or {}, ensure_ascii=False)
            yield CallArguments(self._calls, arguments)
            yield CallEnd(self._calls)
            self._calls += 1
