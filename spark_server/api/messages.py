"""Brings a client's messages into the form that chat templates take, or refuses them by name.

Policy: `developer` is `system`; all system messages are merged in order, with an empty line between
them, into the first message, since the templates take one system message at the start; text parts
are joined; a call's `arguments` become a mapping; an assistant's thought is taken from
`reasoning_content` or from `<think>` in its content. Knows no template.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from engine.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")


def _refuse(message: str, param: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param=param, code="invalid_value")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as the template sees them.

    Raises:
        RequestError: 400 that names the message and the field.
    """
    if not isinstance(messages, list) or not messages:
        _refuse("a list with at least one message is needed", "messages")
    system: list[str] = []
    others: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            _refuse(f"must be an object, not {_kind(message)}", where)
        role = message.get("role")
        if role not in _ROLES:
            shown = repr(role[:32]) if isinstance(role, str) else _kind(role)
            _refuse(f"must be one of {', '.join(_ROLES)}, not {shown}", f"{where}.role")
        if role in ("system", "developer"):
            system.append(_content(message, where))
        else:
            others.append(_message(message, str(role), where))
    if system:
        others.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return others


def _message(message: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            _refuse("is not supported by this server", f"{where}.{name}")
    result: dict[str, Any] = {"role": role}
    if role == "assistant":
        result |= _assistant(message, where)
    else:
        result["content"] = _content(message, where)
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                _refuse(f"must be a string, not {_kind(value)}", f"{where}.{name}")
            result[name] = value
    return result


def _content(message: dict[str, Any], where: str, *, optional: bool = False) -> str:
    content = message.get("content")
    param = f"{where}.content"
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(f"must be a string or a list of parts, not {_kind(content)}", param)
    return "".join(_part(part, f"{param}[{n}]") for n, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        _refuse(f"must be an object, not {_kind(part)}", where)
    kind = part.get("type")
    key = {"text": "text", "refusal": "refusal"}.get(kind) if isinstance(kind, str) else None
    if key is None:
        shown = repr(kind[:32]) if isinstance(kind, str) else _kind(kind)
        _refuse(f"parts of type {shown} are not supported, only text", f"{where}.type")
    text = part.get(key)
    if not isinstance(text, str):
        _refuse(f"must be a string, not {_kind(text)}", f"{where}.{key}")
    return text


def _assistant(message: dict[str, Any], where: str) -> dict[str, Any]:
    content = _content(message, where, optional=True)
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None and not isinstance(reasoning, str):
        _refuse(f"must be a string, not {_kind(reasoning)}", f"{where}.reasoning_content")
    if reasoning is None and "</think>" in content:
        # As the templates do it; done here since they no longer see markup in a client's text.
        thought, _, content = content.partition("</think>")
        reasoning = thought.rpartition("<think>")[2].strip("\n")
        content = content.lstrip("\n")
    result: dict[str, Any] = {"content": content}
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is None:
        return result
    if not isinstance(calls, list):
        _refuse(f"must be a list, not {_kind(calls)}", f"{where}.tool_calls")
    if calls:
        result["tool_calls"] = [_call(c, f"{where}.tool_calls[{n}]") for n, c in enumerate(calls)]
    return result


def _call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        _refuse(f"must be an object, not {_kind(call)}", where)
    if call.get("type", "function") != "function":
        _refuse("only calls of type 'function' are supported", f"{where}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        _refuse(f"must be an object, not {_kind(function)}", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        _refuse("must be a string that is not empty", f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def _arguments(value: object, where: str) -> dict[str, Any]:
    """The mapping in `arguments`: a string on the wire, a mapping in the template."""
    if isinstance(value, str):
        if not value.strip():
            return {}
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            _refuse("must be the text of a JSON object; it is not valid JSON", where)
    if value is None:
        return {}
    if not isinstance(value, dict):
        _refuse(f"must be the text of a JSON object, not of {_kind(value)}", where)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
