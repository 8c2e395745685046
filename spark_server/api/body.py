"""Reads a request's body as one JSON object, strictly.

Refused: bodies above the limit (413), invalid UTF-8, anything that is no object, duplicate keys
(two parsers could read them differently), numbers that are not finite, lone surrogates, and nesting
that exhausts the parser. Knows no fields.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from engine.errors import RequestError

# Larger bodies are parsed in a thread, so that the event loop goes on.
_INLINE_BYTES = 256 * 1024
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Duplicate(ValueError):
    pass


class _Parser:
    """One parse; remembers whether a number was not finite."""

    def __init__(self) -> None:
        self.finite = True

    def parse(self, text: str) -> Any:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_float=self._float,
            parse_constant=self._constant,
        )

    def _float(self, text: str) -> float:
        value = float(text)
        self.finite = self.finite and abs(value) != float("inf")
        return value

    def _constant(self, name: str) -> float:
        self.finite = False
        return float(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return value


def _leaves(value: Any, top: str = "") -> Iterator[tuple[str, Any]]:
    """Every string, number and key below `value`, each with the top-level field it belongs to."""
    stack = [(top, value)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, dict):
            for key, item in node.items():
                yield name or key, key
                stack.append((name or key, item))
        elif isinstance(node, list):
            stack.extend((name, item) for item in node)
        else:
            yield name, node


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        RequestError: it is not one, or breaks a rule above.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: byte {error.start} cannot be read", code="invalid_json"
        ) from error
    parser = _Parser()
    try:
        value = parser.parse(text)
    except _Duplicate as error:
        key = str(error)[:64]
        raise RequestError(
            f"the key {key!r} stands twice in one JSON object", param=key, code="invalid_json"
        ) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        raise RequestError(f"the body must be a JSON object, not {kind}", code="invalid_json")
    if not parser.finite:
        for name, leaf in _leaves(value):
            if isinstance(leaf, float) and (leaf != leaf or abs(leaf) == float("inf")):
                raise RequestError(
                    f"{name}: numbers must be finite", param=name, code="invalid_value"
                )
    if "\\ud" in text or "\\uD" in text:
        for name, leaf in _leaves(value):
            if isinstance(leaf, str) and _SURROGATE.search(leaf):
                raise RequestError(
                    f"{name}: half a surrogate pair is not a character",
                    param=name,
                    code="invalid_value",
                )
    return value


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        f"the body has {size} bytes or more, but at most {limit} are accepted",
        code="body_too_large",
        status=413,
    )


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The request's body as a JSON object of at most `limit` bytes.

    Raises:
        RequestError: see `parse_object`; status 413 for a body above the limit.
    """
    declared = request.headers.get("content-length", "")
    if re.fullmatch("[0-9]{1,18}", declared) and int(declared) > limit:
        raise _too_large(int(declared), limit)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise _too_large(len(data), limit)
    if len(data) <= _INLINE_BYTES:
        return parse_object(bytes(data))
    return await asyncio.to_thread(parse_object, bytes(data))
