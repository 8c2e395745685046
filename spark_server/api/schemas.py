"""The fields of each request body, with types and ranges; strict, so that `true` is no number.

Rules, the same for every endpoint: `null` means the default; an unknown field is accepted with one
warning in the log; a known field that this server cannot honour is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from engine.errors import RequestError

_log = logging.getLogger(__name__)

_MAX_NAMES = 16
_MAX_NAME_CHARS = 64
_MAX_SALT_CHARS = 256

# Fields of OpenAI's or other servers' APIs that are not honoured here, each with the values that
# ask for nothing; null always does.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "function_call": (),
    "functions": ([],),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "documents": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
}
_HINTS: Mapping[str, str] = {
    "function_call": "use tool_choice",
    "functions": "use tools",
    "reasoning_effort": "use chat_template_kwargs, e.g. {'enable_thinking': false}",
    "chat_template": "templates come with the model only",
    "best_of": "use n",
    "guided_json": "use response_format",
    "structured_outputs": "use response_format",
}


class _Body(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, hide_input_in_errors=True
    )


class StreamOptions(_Body):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_Stop = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    ),
]
_Object = Annotated[Any, WithJsonSchema({"type": "object"})]
_Objects = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})]
_Choice = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]
_Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class SamplingBody(_Body):
    """What both generating endpoints share.

    Cached prefixes are shared only by requests with the same `cache_salt`, or all without one.
    `temperature` below 0.001 is greedy. `top_k` 0 or -1 keeps all tokens. `min_tokens` wins over
    stop strings and stop ids.
    """

    model: str | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: _Stop = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: _Object = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=_MAX_SALT_CHARS)
    metrics: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions. `max_completion_tokens` wins over `max_tokens`."""

    messages: _Objects = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: _Objects = None
    tool_choice: _Choice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: _Object = None


class CompletionBody(SamplingBody):
    """POST /v1/completions. Text prompts may hold control tokens; `max_tokens` is 16 by default."""

    prompt: _Prompt = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None


class TokenizeBody(_Body):
    """POST /tokenize: a text, or a chat as it would be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: _Objects = None
    tools: _Objects = None
    chat_template_kwargs: _Object = None
    add_special_tokens: bool | None = None


class DetokenizeBody(_Body):
    """POST /detokenize: ids back to text, special tokens shown."""

    model: str | None = None
    tokens: list[int]


_B = TypeVar("_B", bound=_Body)


def _param(location: tuple[int | str, ...]) -> str:
    """The field to blame; members of `stream_options` are named, others by their field."""
    if len(location) > 1 and location[0] == "stream_options":
        return f"{location[0]}.{location[1]}"
    return str(location[0])


def _message(error: Mapping[str, Any]) -> str:
    text = str(error["msg"])
    return text[:1].lower() + text[1:]


def validate(kind: type[_B], data: dict[str, Any]) -> _B:
    """The typed body.

    Raises:
        RequestError: naming the first field that is wrong or not supported.
    """
    for name, neutral in _UNSUPPORTED.items():
        value = data.get(name)
        # `in` alone would take True for 1.
        asks = value is not None and not any(
            value == allowed and type(value) is type(allowed) for allowed in neutral
        )
        if asks and name not in kind.model_fields:
            hint = f"; {_HINTS[name]}" if name in _HINTS else ""
            raise RequestError(
                f"{name} is not supported by this server{hint}",
                param=name,
                code="unsupported_parameter",
            )
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = _param(first["loc"])
        raise RequestError(
            f"{param}: {_message(first)}", param=param, code="invalid_value"
        ) from None
    _warn_unknown(body)
    return body


def _warn_unknown(body: _Body) -> None:
    extra = body.model_extra or {}
    names = [name for name in extra if name not in _UNSUPPORTED]
    options = getattr(body, "stream_options", None)
    if options is not None:
        names += [f"stream_options.{name}" for name in options.model_extra or {}]
    if names:
        shown = ", ".join(repr(name[:_MAX_NAME_CHARS]) for name in names[:_MAX_NAMES])
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        _log.warning("ignored unknown request fields: %s%s", shown, more)


def body_schema(kind: type[_Body]) -> dict[str, Any]:
    """The `requestBody` of a route that reads its body itself, for the OpenAPI page."""
    schema = kind.model_json_schema()
    if "stream_options" in schema["properties"]:
        schema["properties"]["stream_options"] = StreamOptions.model_json_schema()
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
