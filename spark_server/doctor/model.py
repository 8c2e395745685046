"""Checks of one model's folder: shapes, weights, tokenizer, template, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import DoesNotFitError
from engine.reserve.parameters import stored_bytes
from engine.reserve.sizes import format_bytes
from engine.reserve.start import preflight_of, served_tensors
from engine.weights.headers import checkpoint_files
from engine.weights.model_config import ModelConfig, load_config
from spark_server.doctor.check import Check, fail, ok, warn


def weights(folder: Path) -> Iterator[Check]:
    """config.json, and every safetensors file with its header.

    Raises:
        ModelFormatError: names the file, and what to do about it.
    """
    stored = served_tensors(folder)
    model = load_config(folder)
    yield ok(
        "model",
        f"{model.family.value}, {len(model.layer_kinds)} layers, {model.gdn_layers} of them GDN, "
        f"vocabulary {model.vocab_size}, {'a' if model.mtp_layers else 'no'} drafter",
    )
    files = len(checkpoint_files(folder))
    size = format_bytes(stored_bytes(stored))
    yield ok("weights", f"{len(stored)} tensors in {files} files, {size}")


def text(folder: Path, chat_template: str | None = None) -> Iterator[Check]:
    """Tokenizer and chat template, that of the settings if they name one.

    Raises:
        ModelFormatError, ConfigError: names the file, and what to do about it.
    """
    from spark_server.text.model import load_text_model
    from spark_server.text.template_source import require_template

    loaded = load_text_model(folder, chat_template)
    model = load_config(folder)
    yield _tokenizer(loaded.tokenizer.vocab_size, model)
    if loaded.template is None:
        require_template(folder, chat_template)
        yield ok("chat template", "none, as asked: /v1/completions alone")
    else:
        calls = "XML" if loaded.template.xml_tool_calls else "JSON"
        yield ok(
            "chat template", f"{len(loaded.template.source)} characters, tool calls as {calls}"
        )


def _tokenizer(size: int, model: ModelConfig) -> Check:
    found = f"{size} tokens of a vocabulary of {model.vocab_size}"
    if size > model.vocab_size:
        return fail("tokenizer", found, "tokenizer.json is of another model; download it again")
    strangers = [token for token in model.eos_token_ids if token >= size]
    if not model.eos_token_ids or strangers:
        ends = f"{found}, end ids {list(model.eos_token_ids)}"
        return warn("tokenizer", ends, "set eos_token_id in generation_config.json")
    return ok("tokenizer", f"{found}, end ids {list(model.eos_token_ids)}")


def fits(config: EngineConfig) -> Iterator[Check]:
    """Whether it would start with the default settings.

    Raises:
        ConfigError, ModelFormatError: the settings or the files cannot work.
    """
    try:
        found = preflight_of(config, load_config(Path(config.model_dir)))
    except DoesNotFitError as error:
        what, _, way = str(error).partition("; what would fit: ")
        yield fail("fits", what, f"use {way}, or ask spark plan")
        return
    yield ok(
        "fits",
        f"{format_bytes(found.ledger.total)} of {format_bytes(found.budget)}, "
        f"{config.max_batch_size} sequences of {config.max_seq_len} tokens",
    )
