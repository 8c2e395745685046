"""Renders a model's chat template in a sandbox that is bounded in time and size.

The template comes with the model, the values from the client; neither is trusted. Knows nothing of
tokens or HTTP, and never takes a template from a request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.filters import do_indent
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from engine.errors import ModelFormatError, RequestError

MAX_OUTPUT_CHARS = 8 * 1024 * 1024
MAX_SECONDS = 5.0
_MAX_POWER = 64
_MAX_INDENT = 64
_PADDING_METHODS = frozenset(
    {"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs"}
)

# Names that a request may not set: the template's own inputs and the environment's functions.
RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
        "return_dict",
        "return_tensors",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "raise_exception",
        "strftime_now",
        "range",
        "dict",
        "namespace",
        "lipsum",
        "cycler",
        "joiner",
        "loop",
        "self",
        "caller",
    }
)

_deadline: ContextVar[float] = ContextVar("template_deadline")


class _TemplateLimitError(jinja2.TemplateError):
    """The template works too long or writes too much."""


def _check_deadline() -> None:
    if time.monotonic() > _deadline.get():
        raise _TemplateLimitError(f"the chat template runs longer than {MAX_SECONDS:g} s")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which stops access, with bounds on work added."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        _check_deadline()
        if operator == "*":
            for count, repeated in ((left, right), (right, left)):
                if isinstance(repeated, (str, list, tuple)) and isinstance(count, int):
                    _check_size(count * len(repeated))
        elif operator == "**" and (abs(right) > _MAX_POWER or abs(left) > 2**_MAX_POWER):
            raise _TemplateLimitError("the chat template computes a power that is too large")
        elif operator == "%" and isinstance(left, str):
            # `'%999999999d' % 1` would write a gigabyte in one go, as would the methods below.
            raise jinja2.exceptions.SecurityError("% formatting is not available in chat templates")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse text methods whose cost is a number in the template, not the text's length."""
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja wraps `str.format` before it asks `is_safe_attribute`; here it stays unwrapped."""
        return None


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise _TemplateLimitError(
            f"the chat template writes more than {MAX_OUTPUT_CHARS} characters"
        )


def _check_indent(width: int) -> None:
    if width > _MAX_INDENT:
        raise _TemplateLimitError(f"the chat template indents by more than {_MAX_INDENT}")


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    _check_indent(width)
    return do_indent(text, width, first, blank)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter would escape HTML and all but ASCII."""
    if isinstance(indent, int):
        _check_indent(indent)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Range:
    """A range whose iteration watches the clock, so that empty loops end too."""

    def __init__(self, *arguments: int) -> None:
        self._range = range(*arguments)
        if len(self._range) > MAX_RANGE:
            raise _TemplateLimitError(f"the chat template asks for a range above {MAX_RANGE}")

    def __iter__(self) -> Iterator[int]:
        for number in self._range:
            _check_deadline()
            yield number

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> int:
        return self._range[index]


class ChatTemplate:
    """One compiled template.

    Args:
        source: the jinja text that comes with the model.
        special_tokens: `bos_token` and its like, as the template may use them.

    Raises:
        ModelFormatError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["range"] = _Range
        environment.globals.pop("lipsum", None)
        environment.filters["indent"] = _indent
        environment.filters.pop("center", None)
        environment.filters.pop("format", None)
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFormatError(f"the chat template does not compile: {error}") from error

    @property
    def reasons(self) -> bool:
        """Whether the model's replies may hold `<think>` markup."""
        return "<think>" in self.source or "</think>" in self.source

    @property
    def xml_tool_calls(self) -> bool:
        """Whether calls are written `<function=name>`; otherwise they are JSON (Hermes)."""
        return "<function=" in self.source

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt, with the opening of the assistant's turn at its end.

        Raises:
            RequestError: the template refuses the messages or exceeds its bounds.
        """
        values = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            return self._bounded(values)
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except RecursionError as error:
            raise RequestError(
                "the messages are nested too deeply for the chat template", param="messages"
            ) from error
        except (
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            OverflowError,
            MemoryError,
        ) as error:
            raise RequestError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        finally:
            _deadline.reset(token)

    def _bounded(self, values: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(values):
            size += len(piece)
            _check_size(size)
            _check_deadline()
            pieces.append(piece)
        return "".join(pieces)
