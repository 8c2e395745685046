"""Everything textual that comes with a model: tokenizer, template, defaults of its sampling.

Reads a local folder; knows nothing of weights or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelFormatError, RequestError
from spark_server.text.shield import Shield
from spark_server.text.template import ChatTemplate
from spark_server.text.template_source import find_template, read_json
from spark_server.text.tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say; from the model's `generation_config.json`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered and encoded chat.

    Attributes:
        text: as rendered; stretches of the client's text may be hidden behind placeholders.
        token_ids: with the client's text as ordinary characters.
        opens_reasoning: the prompt ends inside `<think>`, so the reply begins inside it.
        closes_reasoning: the prompt ends with an empty thought: reasoning is switched off.
    """

    text: str
    token_ids: tuple[int, ...]
    opens_reasoning: bool
    closes_reasoning: bool


@dataclass(frozen=True, slots=True)
class TextModel:
    """The textual side of a model. `template` is None for a model without a chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    shield: Shield
    defaults: SamplingDefaults = SamplingDefaults()

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> Prompt:
        """Render and encode a chat whose messages are in the template's form.

        Raises:
            RequestError: no template, or it refuses the messages.
        """
        if self.template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        session = self.shield.session()
        covered = [
            {
                key: item if key == "role" else session.cover(item, param=f"messages[{n}].{key}")
                for key, item in message.items()
            }
            for n, message in enumerate(messages)
        ]
        text = self.template.render(
            covered,
            session.cover(tools, param="tools"),
            session.cover(dict(kwargs), param="chat_template_kwargs"),
        )
        tail = text[-64:].rstrip()
        return Prompt(
            text=text,
            token_ids=tuple(self.tokenizer.encode_shielded(text, session.shields)),
            opens_reasoning=tail.endswith("<think>"),
            closes_reasoning=tail.endswith("</think>"),
        )


def build_text_model(
    tokenizer: Tokenizer,
    template_source: str | None,
    special_tokens: Mapping[str, str],
    defaults: SamplingDefaults | None = None,
) -> TextModel:
    """Put the parts together; tests build theirs with it."""
    return TextModel(
        tokenizer=tokenizer,
        template=ChatTemplate(template_source, special_tokens) if template_source else None,
        shield=Shield([token.text for token in tokenizer.added_tokens]),
        defaults=defaults or SamplingDefaults(),
    )


def load_text_model(folder: str | Path, chat_template: str | None = None) -> TextModel:
    """Read tokenizer, template and defaults from a model's folder.

    Args:
        folder: of the model.
        chat_template: see template_source.find_template.

    Raises:
        ConfigError: the template that was asked for cannot be read.
        ModelFormatError: `tokenizer.json` is missing or a file is not what it should be.
    """
    root = Path(folder)
    path = root / "tokenizer.json"
    if not path.is_file():
        raise ModelFormatError(f"{root} has no tokenizer.json, which the server needs")
    config = read_json(root / "tokenizer_config.json")
    special = read_json(root / "special_tokens_map.json") | config
    try:
        tokenizer = Tokenizer(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    return build_text_model(
        tokenizer,
        find_template(root, chat_template),
        {name: text for name in _SPECIAL_NAMES if (text := _token_text(special.get(name)))},
        _sampling_defaults(read_json(root / "generation_config.json"), root),
    )


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _sampling_defaults(config: Mapping[str, Any], root: Path) -> SamplingDefaults:
    bounds: dict[str, tuple[type, float, float]] = {
        "temperature": (float, 0.0, 2.0),
        "top_p": (float, 1e-6, 1.0),
        "top_k": (int, 0, 2**31),
        "min_p": (float, 0.0, 1.0),
        "repetition_penalty": (float, 0.01, 10.0),
    }
    values: dict[str, Any] = {}
    for name, (kind, low, high) in bounds.items():
        value = config.get(name)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
        ):
            raise ModelFormatError(
                f"{root / 'generation_config.json'}: {name} is {value!r}, "
                f"not a number from {low:g} to {high:g}"
            )
        values[name] = kind(value)
    return SamplingDefaults(**values)
