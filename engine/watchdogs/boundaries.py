"""Which tokens end a sentence or a line: good places to cut an output. Knows no output."""

from __future__ import annotations

from collections.abc import Iterable

_ENDS = (".", "!", "?", "\u2026", "\u3002", "\uff01", "\uff1f", "\u0964", "\u061f")
# What may stand between the end of a sentence and the end of its token.
_CLOSING = " \t\"'\u201d\u2019\u00bb)]}*_`"


def ends_sentence_or_line(piece: bytes) -> bool:
    """Whether a token's bytes hold a newline, or end a sentence but for quotes and brackets.

    Bytes of characters that the token does not hold whole are passed over.
    """
    text = piece.decode("utf-8", errors="ignore")
    return "\n" in text or text.rstrip(_CLOSING).endswith(_ENDS)


def boundary_mask(pieces: Iterable[bytes]) -> bytes:
    """1 for every id whose token is a boundary, else 0, one byte an id."""
    return bytes(ends_sentence_or_line(piece) for piece in pieces)
