"""The bytes of every token, read from a checkpoint's tokenizer.json. Knows no grammar and no text.

The server's own table serves the decoding of text, and the engine must not import the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelFormatError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar must know of a vocabulary.

    Attributes:
        pieces: bytes by id, one entry per row of the embedding; empty for ids that stand for no
            text of their own (added tokens, padding), which a grammar never allows.
        end_ids: ids that end a sequence.
    """

    pieces: tuple[bytes, ...]
    end_ids: tuple[int, ...]


def load_vocabulary(folder: Path, vocab_size: int, end_ids: tuple[int, ...]) -> Vocabulary:
    """The vocabulary of a checkpoint, padded to the model's `vocab_size`.

    Raises:
        ModelFormatError: tokenizer.json is missing, or of a kind whose bytes are not known.
    """
    path = folder / "tokenizer.json"
    try:
        definition = json.loads(path.read_text(encoding="utf-8"))
        tokens = _tokens(definition["model"]["vocab"])
        added = {int(token["id"]) for token in definition.get("added_tokens") or ()}
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(f"{path} is no tokenizer: {type(error).__name__} {error}") from error
    to_bytes = _byte_level if "ByteLevel" in _decoders(definition.get("decoder")) else _plain
    alphabet = byte_alphabet()
    pieces = [b""] * vocab_size
    for token, token_id in tokens.items():
        if token_id < vocab_size and token_id not in added:
            pieces[token_id] = to_bytes(token, alphabet)
    return Vocabulary(tuple(pieces), end_ids)


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character; this maps them back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _tokens(vocab: Any) -> dict[str, int]:
    """Token -> id of a vocabulary that is a mapping (BPE) or a list of scored tokens (Unigram)."""
    if isinstance(vocab, dict):
        return vocab
    return {token: token_id for token_id, (token, _) in enumerate(vocab)}


def _decoders(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders") or ()
    return {str(decoder.get("type"))}.union(*(_decoders(part) for part in inner))


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    if all(char in alphabet for char in token):
        return bytes([alphabet[char] for char in token])
    return token.encode()


def _plain(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Sentencepiece: a word begins with U+2581, and unknown bytes have tokens of their own."""
    found = _BYTE_TOKEN.match(token)
    return bytes([int(found[1], 16)]) if found else token.replace("▁", " ").encode()
