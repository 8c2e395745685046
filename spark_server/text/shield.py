"""Keeps a user's text from becoming control tokens, by placeholders that stand in for it.

Every place in the client's values where the text of an added token stands, or where one could begin
at the end of a string and be completed by what the template writes next, is replaced by a random
placeholder before rendering. The tokenizer puts the text back as ordinary characters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from engine.errors import RequestError

MAX_DEPTH = 64


def _prefixes(texts: Sequence[str]) -> list[str]:
    found = {text[:length] for text in texts for length in range(1, len(text))}
    return sorted(found, key=len, reverse=True)


class Shield:
    """Finds the text of a tokenizer's added tokens in values that a client sent."""

    def __init__(self, added_texts: Sequence[str]) -> None:
        texts = sorted(added_texts, key=len, reverse=True)
        whole = "|".join(map(re.escape, texts))
        partial = "|".join(map(re.escape, _prefixes(texts)))
        pattern = f"{whole}|(?:{partial})\\Z" if partial else whole
        self._pattern = re.compile(pattern) if texts else None
        self._firsts = "".join(sorted({text[0] for text in texts}))

    def session(self) -> ShieldSession:
        """Placeholders of one request."""
        return ShieldSession(self._pattern, self._firsts)


class ShieldSession:
    """Replaces within one request; `shields` maps each placeholder to the text it stands for."""

    def __init__(self, pattern: re.Pattern[str] | None, firsts: str) -> None:
        self._pattern = pattern
        self._firsts = firsts
        # Letters and digits only, so that escaping and trimming in a template leave it whole.
        self._nonce = "q" + secrets.token_hex(12) + "q"
        self.shields: dict[str, str] = {}

    def cover(self, value: Any, *, param: str, depth: int = 0) -> Any:
        """A copy of a JSON value with every dangerous stretch of its strings replaced.

        Raises:
            RequestError: the value is nested deeper than MAX_DEPTH; it names `param`.
        """
        if depth > MAX_DEPTH:
            raise RequestError(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, list):
            return [self.cover(item, param=param, depth=depth + 1) for item in value]
        if isinstance(value, dict):
            return {
                self._cover_text(key): self.cover(item, param=param, depth=depth + 1)
                for key, item in value.items()
            }
        return value

    def _cover_text(self, text: str) -> str:
        # The search holds the interpreter; most texts hold no character such a token begins with.
        if self._pattern is None or not any(char in text for char in self._firsts):
            return text
        return self._pattern.sub(self._placeholder, text)

    def _placeholder(self, match: re.Match[str]) -> str:
        name = f"{self._nonce}{len(self.shields)}q"
        self.shields[name] = match.group()
        return name
