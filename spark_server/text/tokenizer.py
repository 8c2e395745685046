"""The tokenizer of one model: text to ids and back, read from `tokenizer.json`.

Uses the `tokenizers` library alone: `transformers` would add a second of import and gives the same
ids (a test compares them). Knows nothing of templates; encoding is safe from several threads.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import tokenizers

from spark_server.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer

# Markup that the reasoning and tool-call parsers must see even when a vocabulary calls it special.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in text before any merging (`<|im_end|>`, `<think>`, ...)."""

    token_id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@lru_cache(maxsize=1)
def _byte_alphabet() -> Mapping[str, int]:
    """Byte-level BPE writes every byte as one printable character; this maps them back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    alphabet.update({chr(256 + n): b for n, b in enumerate(others)})
    return alphabet


def _piece_bytes(piece: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:  # an added token outside the alphabet stands for its own text
        return piece.encode()


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _added_tokens(definition: Mapping[str, object]) -> tuple[AddedToken, ...]:
    raw = definition.get("added_tokens")
    entries = raw if isinstance(raw, list) else []
    return tuple(
        AddedToken(
            token_id=entry["id"],
            text=entry["content"],
            special=bool(entry.get("special")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            normalized=bool(entry.get("normalized")),
        )
        for entry in entries
        if entry["content"]
    )


class Tokenizer:
    """Text to ids and back.

    Args:
        definition: the text of `tokenizer.json`.
    """

    def __init__(self, definition: str) -> None:
        parsed = json.loads(definition)
        self._definition = definition
        self._main = tokenizers.Tokenizer.from_str(definition)
        self._main.no_truncation()
        self._main.no_padding()
        self._plain: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        self.vocab_size = self._main.get_vocab_size(with_added_tokens=True)
        self.added_tokens = _added_tokens(parsed)
        self.special_ids = frozenset(t.token_id for t in self.added_tokens if t.special)
        self._has_normalizer = parsed.get("normalizer") is not None
        self._byte_level = _is_byte_level(parsed.get("decoder"))
        texts = sorted((t.text for t in self.added_tokens), key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._added_by_text = {t.text: t for t in self.added_tokens}
        markup = {t.token_id for t in self.added_tokens if t.text in MARKUP}
        self._hidden_ids = frozenset(self.special_ids - markup)
        self._pieces = self._piece_table() if self._byte_level else []
        self._shown_pieces = [
            b"" if i in self._hidden_ids else p for i, p in enumerate(self._pieces)
        ]

    def _piece_table(self) -> list[bytes]:
        vocabulary = self._main.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for piece, token_id in vocabulary.items():
            table[token_id] = _piece_bytes(piece)
        return table

    # -- text to ids -------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special-token text becomes special ids."""
        ids: list[int] = self._main.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as ordinary characters: no text becomes an added token."""
        ids: list[int] = self._plain_tokenizer().encode(text, add_special_tokens=False).ids
        return ids

    def encode_shielded(self, text: str, shields: Mapping[str, str]) -> list[int]:
        """Ids of a rendered prompt in which `shields` (placeholder -> user's text) stand in.

        Added tokens count only where the text around the placeholders holds them; the user's own
        text is put back afterwards and encoded as ordinary characters, together with its
        neighbours, so that merges are those of the whole text.
        """
        if not shields and not self._needs_plain:
            return self.encode(text, add_special_tokens=False)
        restore = re.compile("|".join(map(re.escape, shields))) if shields else None
        ids: list[int] = []
        for segment in self._split_added(text):
            if isinstance(segment, AddedToken):
                ids.append(segment.token_id)
                continue
            if restore is not None:
                segment = restore.sub(lambda match: shields[match.group()], segment)
            ids.extend(self.encode_plain(segment))
        return ids

    @property
    def _needs_plain(self) -> bool:
        """Normalisation could turn other characters into the text of such a token."""
        return self._has_normalizer and any(t.normalized for t in self.added_tokens)

    def _split_added(self, text: str) -> Iterable[str | AddedToken]:
        position, strip_next = 0, False
        matches = self._added_pattern.finditer(text) if self._added_pattern else ()
        for match in matches:
            token = self._added_by_text[match.group()]
            before = text[position : match.start()]
            before = before.lstrip() if strip_next else before
            before = before.rstrip() if token.lstrip else before
            if before:
                yield before
            yield token
            position, strip_next = match.end(), token.rstrip
        rest = text[position:].lstrip() if strip_next else text[position:]
        if rest:
            yield rest

    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        with self._plain_lock:
            if self._plain is None:
                definition = json.loads(self._definition)
                definition["added_tokens"] = []
                definition["truncation"] = definition["padding"] = None
                self._plain = tokenizers.Tokenizer.from_str(json.dumps(definition))
            return self._plain

    # -- ids to text -------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary are ignored."""
        text: str = self._main.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence."""
        if self._byte_level:
            return ByteDetokenizer(self._shown_pieces if skip_special_tokens else self._pieces)
        hidden = self._hidden_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=False), self._main.id_to_token, hidden
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for; empty outside the vocabulary."""
        if self._byte_level:
            return self._pieces[token_id] if token_id < len(self._pieces) else b""
        piece = self._main.id_to_token(token_id)
        if piece is None:
            return b""
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()
