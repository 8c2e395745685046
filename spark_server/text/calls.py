"""What tool-call parsers have in common: their events, and values typed by a tool's JSON schema.

Knows neither dialect.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_REFERENCES = 8


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside any call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call whose name is known; its arguments follow. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of the arguments' JSON text."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete."""

    index: int


Event = Text | CallStart | CallArguments | CallEnd


class ToolSchemas:
    """The declared tools: which types each parameter may have."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool["function"]
            self._schemas[function["name"]] = function.get("parameters") or {}

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """JSON type names that the parameter may have; `string` when nothing is declared."""
        root = self._schemas.get(function, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, root, _MAX_REFERENCES)) or frozenset({"string"})


def _types(schema: object, root: Mapping[str, Any], budget: int) -> set[str]:
    if not isinstance(schema, Mapping) or budget <= 0:
        return set()
    found: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        found.add(declared)
    elif isinstance(declared, list):
        found.update(name for name in declared if isinstance(name, str))
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list):
            for option in options[:32]:
                found |= _types(option, root, budget - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found |= _types(_resolve(root, reference), root, budget - 1)
    if not found and isinstance(schema.get("enum"), list):
        found = {_type_of(value) for value in schema["enum"][:32]}
    if not found and "properties" in schema:
        found = {"object"}
    return found


def _resolve(root: Mapping[str, Any], reference: str) -> object:
    node: object = root
    for step in reference[2:].split("/"):
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "string"


def value_json(raw: str, types: frozenset[str]) -> str:
    """JSON text of a parameter that the model wrote as `raw`; a string when no type fits."""
    text = raw.strip()
    if types != {"string"} and text in ("null", "None"):
        return "null"
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    if types & {"integer", "number"}:
        number = _number(text)
        if number is not None:
            return number
    if types & {"object", "array"}:
        container = _container(text)
        if container is not None:
            return container
    return json.dumps(raw, ensure_ascii=False)


def _number(text: str) -> str | None:
    """The JSON number that `text` spells, or None."""
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return text if abs(value) != float("inf") else None


def _container(text: str) -> str | None:
    """JSON of an object or array that `text` spells, in JSON or as Python would."""
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
            if isinstance(value, (dict, list)):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return None
