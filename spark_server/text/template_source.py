"""Finds the source of a model's chat template; compiles nothing and knows no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelFormatError

# The setting's value for a model that is to be served without chats.
NO_TEMPLATE = "none"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no file.

    Raises:
        ModelFormatError: it is something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} is not a JSON object")
    return value


def find_template(root: Path, asked: str | None = None) -> str | None:
    """The template of a model's folder, or of the file that was asked for; None where none is.

    Args:
        root: the model's folder.
        asked: `--chat-template`: a file, `none`, or None for the model's own.

    Raises:
        ConfigError: the file that was asked for cannot be read.
        ModelFormatError: a file of the model cannot be read.
    """
    if asked == NO_TEMPLATE:
        return None
    if asked is not None:
        return _read(Path(asked), ConfigError, f"--chat-template {asked}")
    path = root / "chat_template.jinja"
    if path.is_file():
        return _read(path, ModelFormatError, str(path))
    source = read_json(root / "chat_template.json").get("chat_template")
    source = source or read_json(root / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):  # several named templates
        source = _default(source, root)
    return source if isinstance(source, str) else None


def require_template(root: Path, asked: str | None = None) -> None:
    """Refuse a model without a template, unless it was asked for without.

    Raises:
        ModelFormatError: there is none; names the files that could hold it, and the way out.
        ConfigError: the file that was asked for cannot be read.
    """
    if not find_template(root, asked) and asked != NO_TEMPLATE:
        raise ModelFormatError(
            f"{root} has no chat template, neither chat_template.jinja nor chat_template in "
            "tokenizer_config.json; give one with --chat-template FILE, or serve /v1/completions "
            f"alone with --chat-template {NO_TEMPLATE}"
        )


def _read(path: Path, kind: type[ConfigError | ModelFormatError], name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise kind(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise kind(f"{name}: not a text file") from None


def _default(named: list[Any], root: Path) -> object:
    try:
        return {entry["name"]: entry["template"] for entry in named}.get("default")
    except (KeyError, TypeError) as error:
        path = root / "tokenizer_config.json"
        raise ModelFormatError(f"{path}: chat_template is no list of named templates") from error
