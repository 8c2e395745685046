"""Tools, the choice among them, and output formats: checked, and turned into a grammar if forced.

Knows what the client declared, not what a model writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from engine.errors import RequestError
from engine.grammar.schema import check_schema as check_followed
from spark_server.text.forced import named_schema, required_schema

MAX_TOOLS = 512
MAX_SCHEMA_CHARS = 256 * 1024
MAX_SCHEMA_DEPTH = 48
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NO_GRAMMAR = "needs grammar-constrained output, which this engine does not offer"


class Choice(Enum):
    """What the reply may do with the tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The declared tools and what is to be done with them.

    Attributes:
        tools: as the template gets them; empty when none are declared.
        named: the function that `Choice.NAMED` forces.
        suppress: calls in the reply are dropped (`tool_choice: none`).
        grammar: JSON schema text that forces the call, or None.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: Choice = Choice.AUTO
    named: str | None = None
    suppress: bool = False
    grammar: str | None = None


def _refuse(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    raise RequestError(f"{param}: {message}", param=param, code=code)


def check_schema(schema: object, param: str) -> dict[str, Any]:
    """A JSON schema of bounded size and depth.

    Raises:
        RequestError: it is no object, too long or too deep.
    """
    if not isinstance(schema, dict):
        _refuse("must be a JSON schema object", param)
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            break
    else:
        _refuse(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels", param)
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_CHARS:
        _refuse(f"has {size} characters, at most {MAX_SCHEMA_CHARS} are accepted", param)
    return schema


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        _refuse("must be a list", "tools")
    if len(value) > MAX_TOOLS:
        _refuse(f"has {len(value)} tools, at most {MAX_TOOLS} are accepted", "tools")
    names: set[str] = set()
    for number, tool in enumerate(value):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            _refuse("must be {'type': 'function', 'function': {...}}", where)
        if tool.get("type") != "function":
            _refuse("only tools of type 'function' are supported", f"{where}.type")
        function = tool["function"]
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            _refuse("must match [A-Za-z0-9_.-]{1,128}", f"{where}.function.name")
        if name in names:
            _refuse(f"{name!r} is declared twice", f"{where}.function.name")
        names.add(name)
        description = function.get("description")
        if description is not None and not isinstance(description, str):
            _refuse("must be a string", f"{where}.function.description")
        if function.get("parameters") is not None:
            check_schema(function["parameters"], f"{where}.function.parameters")
    return tuple(value)


def _choice(value: object, names: set[str]) -> tuple[Choice, str | None]:
    if value is None or value == "auto":
        return Choice.AUTO, None
    if value == "none":
        return Choice.NONE, None
    if value == "required":
        if not names:
            _refuse("'required' needs at least one tool in tools", "tool_choice")
        return Choice.REQUIRED, None
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function":
        _refuse(
            "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}",
            "tool_choice",
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        shown = repr(name[:64]) if isinstance(name, str) else "no name"
        _refuse(f"names {shown}, which is not among tools", "tool_choice")
    return Choice.NAMED, name


def plan_tools(tools: object, choice: object, *, parallel: bool, grammar: bool) -> ToolPlan:
    """Check `tools` and `tool_choice`.

    Args:
        parallel: whether several calls are wanted.
        grammar: whether the engine can constrain its output.

    Raises:
        RequestError: they are wrong, contradict each other, or need a grammar that is not there.
    """
    declared = _tools(tools)
    by_name = {tool["function"]["name"]: tool for tool in declared}
    kind, named = _choice(choice, set(by_name))
    if kind is Choice.NONE:
        return ToolPlan(choice=kind, suppress=True)
    if kind is Choice.AUTO:
        return ToolPlan(tools=declared, choice=kind)
    if not grammar:
        _refuse(f"{kind.value} {_NO_GRAMMAR}; use 'auto'", "tool_choice", "unsupported_value")
    if named is not None:
        source = named_schema(by_name[named])
    else:
        source = required_schema(declared, parallel=parallel)
    check_followed(source, "tools")
    return ToolPlan(tools=declared, choice=kind, named=named, grammar=source)


def output_grammar(response_format: object, *, grammar: bool) -> str | None:
    """JSON schema text that `response_format` asks for, or None for plain text.

    Raises:
        RequestError: it is malformed, or needs a grammar that is not there.
    """
    if response_format is None:
        return None
    param = "response_format"
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if not isinstance(response_format, Mapping) or kind not in (
        "text",
        "json_object",
        "json_schema",
    ):
        _refuse("must be {'type': 'text'}, 'json_object' or 'json_schema'", param)
    if kind == "text":
        return None
    schema: Mapping[str, Any] = {"type": "object"}
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        if not isinstance(inner, Mapping):
            _refuse("json_schema must be an object with a schema", param)
        if not isinstance(inner.get("name"), str):
            _refuse("json_schema.name must be a string", param)
        schema = check_schema(inner.get("schema"), param)
    if not grammar:
        _refuse(f"{kind} {_NO_GRAMMAR}; use 'text'", param, "unsupported_value")
    source = json.dumps(schema, ensure_ascii=False)
    check_followed(source, param)
    return source
