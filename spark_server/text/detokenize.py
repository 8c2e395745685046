"""Token ids to text while they arrive, exactly: the pieces together equal a one-shot decode.

Knows nothing of stop strings or markup. A detokenizer belongs to one sequence.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text, holding back what is not yet certain."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these ids; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD as in a one-shot decode."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: a table of bytes per id and an incremental UTF-8 decoder.

    Both Python's decoder and the tokenizer's replace the maximal invalid prefix by one U+FFFD, so
    the two agree on broken bytes too. Costs about 0.5 us a token.

    Args:
        pieces: bytes of every id; empty for ids that are not shown. Ids beyond it are ignored, as
            the tokenizer does.
    """

    __slots__ = ("_decode", "_pieces", "_size")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._size = len(pieces)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            token_id = token_ids[0]
            return self._decode(self._pieces[token_id] if token_id < self._size else b"")
        size, pieces = self._size, self._pieces
        return self._decode(b"".join([pieces[i] for i in token_ids if i < size]))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For all other vocabularies: decodes a short window twice and keeps the difference.

    A run of byte-fallback tokens is decoded as a whole by the tokenizer, so it is held back until a
    token of another kind ends it; so is text that ends in an incomplete character.

    Args:
        decode: ids to text, special tokens already left out or kept as wanted.
        piece: the vocabulary's string for an id, or None outside it.
        skipped: ids that decode to nothing.
    """

    _CONTEXT = 6

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        piece: Callable[[int], str | None],
        skipped: frozenset[int],
    ) -> None:
        self._decode = decode
        self._piece = piece
        self._skipped = skipped
        self._done: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        kept = [i for i in token_ids if i not in self._skipped and self._piece(i) is not None]
        if not kept:
            return ""
        self._pending.extend(kept)
        if _BYTE_TOKEN.match(self._piece(self._pending[-1]) or ""):
            return ""
        text = self._difference()
        if text.endswith("�"):
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        text = self._difference() if self._pending else ""
        self._advance()
        return text

    def _difference(self) -> str:
        before = self._decode(self._done) if self._done else ""
        return self._decode(self._done + self._pending)[len(before) :]

    def _advance(self) -> None:
        # The context must not begin inside a run of byte tokens, or the run decodes differently.
        done = (self._done + self._pending)[-self._CONTEXT :]
        while len(done) > 1 and _BYTE_TOKEN.match(self._piece(done[0]) or ""):
            done = done[1:]
        self._done, self._pending = done, []
