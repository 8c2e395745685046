"""Finds tool calls in a reply while it arrives, in both dialects of the Qwen family.

XML: `<tool_call><function=f><parameter=k>value</parameter></function></tool_call>`; Hermes:
`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`. Knows nothing of HTTP or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from enum import Enum

from spark_server.text.calls import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Text,
    ToolSchemas,
    value_json,
)
from spark_server.text.reasoning import first_tag, partial_tag

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_PARAMETER, _END_FUNCTION = "<parameter=", "</function>"
# What ends a value; without `</parameter>` only at the start of a line, since a value may be code.
_VALUE_ENDS = (
    "\n</parameter>",
    "</parameter>",
    "\n<parameter=",
    "\n</function>",
    "\n</tool_call>",
)
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_STRING_OR_BRACE = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)


class _State(Enum):
    TEXT = "text"
    OPENED = "opened"
    PARAMETERS = "parameters"
    VALUE = "value"
    JSON_HEAD = "json head"
    JSON_BODY = "json body"
    AFTER = "after"


class ToolCallParser:
    """Turns text into events; markup of a call is never part of a Text event.

    White space between text and a call, and between calls, is dropped. Markup that turns out to be
    no call is given back as text, or dropped under `suppress`.

    Args:
        schemas: types of the declared tools' parameters.
        bare_functions: also take `<function=` without `<tool_call>` in front (XML dialect).
        suppress: report no calls at all (`tool_choice: none`).
    """

    def __init__(
        self, schemas: ToolSchemas, *, bare_functions: bool, suppress: bool = False
    ) -> None:
        self._schemas = schemas
        self._openers: tuple[str, ...] = (_OPEN, _FUNCTION) if bare_functions else (_OPEN,)
        if suppress:
            self._openers += (_CLOSE,)
        self._suppress = suppress
        self._state = _State.TEXT
        self._buffer = ""
        self._trim = False
        self._space = ""
        self._calls = 0
        self._name = ""
        self._first = True
        self._types: frozenset[str] = frozenset()
        self._value_started = False
        self._scan = _ObjectScan()
        self._steps: dict[_State, Callable[[], Iterator[Event]]] = {
            _State.TEXT: self._text,
            _State.OPENED: self._opened,
            _State.PARAMETERS: self._parameters,
            _State.VALUE: self._value,
            _State.JSON_HEAD: self._json_head,
            _State.JSON_BODY: self._json_body,
            _State.AFTER: self._after,
        }

    def feed(self, text: str) -> list[Event]:
        """Events that became certain with `text`."""
        self._buffer += text
        events: list[Event] = []
        while True:
            before = (self._state, len(self._buffer))
            events.extend(event for event in self._steps[self._state]() if self._shown(event))
            if (self._state, len(self._buffer)) == before:
                return events

    def finish(self, *, complete: bool) -> list[Event]:
        """The end of the reply: `complete` when the model ended it, False when it was cut."""
        events = [event for event in self._ending(complete) if self._shown(event)]
        self._buffer = ""
        return events

    def _shown(self, event: Event) -> bool:
        if isinstance(event, Text):
            return bool(event.text)
        return not self._suppress

    def _ending(self, complete: bool) -> Iterator[Event]:
        state = self._state
        if state is _State.TEXT:
            if self._buffer.strip() or not self._calls:
                yield Text(self._buffer)
        elif state is _State.PARAMETERS and complete:
            yield from self._end_xml()
        elif state is _State.VALUE and complete:
            yield from self._value_piece(self._buffer.removesuffix("\n"), last=True)
            yield from self._end_xml()
        elif state is _State.JSON_HEAD and complete:
            yield from self._whole_json(self._buffer)

    # -- text and the opening of a call --------------------------------------------------------

    def _text(self) -> Iterator[Event]:
        if self._trim:
            self._buffer = self._buffer.lstrip()
            self._trim = not self._buffer
        position, tag = first_tag(self._buffer, self._openers)
        if position >= 0:
            text = self._buffer[:position]
            self._space = text[len(text.rstrip()) :]
            yield Text(text.rstrip())
            self._buffer = self._buffer[position + (0 if tag == _FUNCTION else len(tag)) :]
            self._state = _State.TEXT if tag == _CLOSE else _State.OPENED
            return
        sure = len(self._buffer) - partial_tag(self._buffer, self._openers)
        sure = len(self._buffer[:sure].rstrip())
        yield Text(self._buffer[:sure])
        self._buffer = self._buffer[sure:]

    def _opened(self) -> Iterator[Event]:
        body = self._buffer.lstrip()
        if body.startswith(_FUNCTION):
            end = body.find(">")
            if end < 0:
                return
            self._name = body[len(_FUNCTION) : end].strip()
            self._buffer = body[end + 1 :]
            self._first = True
            self._state = _State.PARAMETERS
            yield CallStart(self._calls, self._name)
        elif body.startswith("{"):
            self._state = _State.JSON_HEAD
        elif body and not _FUNCTION.startswith(body):
            yield from self._not_a_call()

    def _not_a_call(self) -> Iterator[Event]:
        """Give the opening back as text; what follows it is looked at anew."""
        self._state = _State.TEXT
        if not self._suppress:
            yield Text(self._space + _OPEN)

    # -- XML -------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[Event]:
        tags = (_PARAMETER, _END_FUNCTION, _CLOSE)
        position, tag = first_tag(self._buffer, tags)
        if position < 0:
            keep = partial_tag(self._buffer, tags)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return
        if tag == _PARAMETER:
            end = self._buffer.find(">", position)
            if end < 0:
                self._buffer = self._buffer[position:]
                return
            key = self._buffer[position + len(_PARAMETER) : end].strip()
            self._buffer = self._buffer[end + 1 :]
            self._types = self._schemas.types(self._name, key)
            self._value_started = False
            self._state = _State.VALUE
            opening = "{" if self._first else ", "
            self._first = False
            quote = '"' if self._types == {"string"} else ""
            yield self._arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}")
            return
        self._buffer = self._buffer[position:].removeprefix(_END_FUNCTION)
        yield from self._end_xml()

    def _value(self) -> Iterator[Event]:
        position, tag = first_tag(self._buffer, _VALUE_ENDS)
        streams = self._types == {"string"}
        if position < 0:
            if not streams:
                return
            sure = len(self._buffer) - partial_tag(self._buffer, _VALUE_ENDS)
            if not self._value_started and sure == 0:
                return
            value, self._buffer = self._buffer[:sure], self._buffer[sure:]
            yield from self._value_piece(value, last=False)
            return
        value = self._buffer[:position]
        keep = 0 if tag.endswith("</parameter>") else len(tag) - 1
        self._buffer = self._buffer[position + len(tag) - keep :]
        self._state = _State.PARAMETERS
        yield from self._value_piece(value, last=True)

    def _value_piece(self, value: str, *, last: bool) -> Iterator[Event]:
        if not self._value_started and (value or last):
            value = value.removeprefix("\n")
            self._value_started = True
        if self._types != {"string"}:
            yield self._arguments(value_json(value, self._types))
            return
        quoted = json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if last else "")
        if quoted:
            yield self._arguments(quoted)

    def _arguments(self, fragment: str) -> Event:
        return CallArguments(self._calls, fragment)

    def _end_xml(self) -> Iterator[Event]:
        yield self._arguments("{}" if self._first else "}")
        yield from self._end_call()

    def _end_call(self) -> Iterator[Event]:
        yield CallEnd(self._calls)
        self._calls += 1
        self._state = _State.AFTER

    # -- Hermes ----------------------------------------------------------------------------------

    def _json_head(self) -> Iterator[Event]:
        match = _HEAD.match(self._buffer)
        if match:
            self._buffer = self._buffer[match.end() :]
            self._scan = _ObjectScan()
            self._state = _State.JSON_BODY
            yield CallStart(self._calls, _unquote(match.group(1)))
            return
        position = self._buffer.find(_CLOSE)
        if position >= 0:
            body, self._buffer = self._buffer[:position], self._buffer[position:]
            yield from self._whole_json(body)

    def _whole_json(self, body: str) -> Iterator[Event]:
        """A call in an order or shape that does not stream: parsed as a whole."""
        call = _parse_call(body)
        if call is None:
            yield from self._not_a_call()
            if not self._suppress:
                yield Text(body)
            return
        yield CallStart(self._calls, call[0])
        yield self._arguments(call[1])
        yield from self._end_call()

    def _json_body(self) -> Iterator[Event]:
        end = self._scan.advance(self._buffer)
        piece = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(piece) :]
        if piece:
            yield self._arguments(piece)
        if end is not None:
            yield from self._end_call()

    # -- between a call's end and what follows ---------------------------------------------------

    def _after(self) -> Iterator[Event]:
        """Closing markup is dropped, also when it is incomplete or missing."""
        body = self._buffer.lstrip(" \t\r\n}")
        if body.startswith(_CLOSE):
            body = body.removeprefix(_CLOSE)
        elif not body or _CLOSE.startswith(body):
            return
        self._buffer = body
        self._trim = True
        self._state = _State.TEXT
        yield from ()


class _ObjectScan:
    """Finds the end of a JSON object that arrives in pieces, strings and escapes minded."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def advance(self, text: str) -> int | None:
        """Scan `text`; the position right after the object's end, or None if it goes on."""
        position = 0
        if self._escaped and text:
            position, self._escaped = 1, False
        for match in _STRING_OR_BRACE.finditer(text, position):
            char = match.group()
            if self._in_string:
                # A lone backslash stands at the end of this piece: it escapes what comes next.
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return match.end()
        return None


def _unquote(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def _parse_call(body: str) -> tuple[str, str] | None:
    """Name and arguments' JSON text of a Hermes call, or None."""
    try:
        call = json.loads(body)
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        arguments = {} if arguments is None else arguments
        if isinstance(call["name"], str) and isinstance(arguments, dict):
            return call["name"], json.dumps(arguments, ensure_ascii=False)
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
    return None
