"""Splits a reply into reasoning and content at `<think>` markup, however the text is cut.

Knows nothing of tokens or of calls, except that `<tool_call>` ends an open thought.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_OPEN, _CLOSE, _CALL = "<think>", "</think>", "<tool_call>"


class ReasoningMode(Enum):
    """What the prompt says about the thought.

    NONE: the model knows no such markup; text passes as it is. OPEN: the prompt ends inside a
    thought. CLOSED: reasoning is switched off; a thought that comes anyway is dropped. AUTO: the
    model may open a thought by itself.
    """

    NONE = "none"
    OPEN = "open"
    CLOSED = "closed"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the reply that is either reasoning or content."""

    text: str
    reasoning: bool


def partial_tag(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest tail of `text` that is a proper prefix of one of `tags`."""
    longest = min(len(text), max(map(len, tags)) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(tag) > length and tag.startswith(tail) for tag in tags):
            return length
    return 0


def first_tag(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Position and name of the first of `tags` in `text`, or (-1, "")."""
    found = [(position, tag) for tag in tags if (position := text.find(tag)) >= 0]
    return min(found, default=(-1, ""))


class ReasoningSplitter:
    """Fed with text, gives parts; no tag is ever part of them.

    Newlines right after a tag and white space right before `</think>` belong to the markup and are
    dropped; so is a `</think>` that closes nothing. A reply that is cut inside a thought is all
    reasoning.
    """

    def __init__(self, mode: ReasoningMode) -> None:
        self._mode = mode
        self._inside = mode is ReasoningMode.OPEN
        self._trim = self._inside
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """Parts that became certain with `text`."""
        if self._mode is ReasoningMode.NONE:
            return [Part(text, False)] if text else []
        if not (self._held or self._trim or self._inside or "<" in text):
            return [Part(text, False)] if text else []
        return [part for part in self._walk(self._held + text) if self._shown(part)]

    def finish(self) -> list[Part]:
        """What was held back for a tag that did not come."""
        text, self._held = self._held, ""
        if self._trim:
            text = text.lstrip("\n")
        part = Part(text, self._inside)
        return [part] if text.strip() and self._shown(part) else []

    def _shown(self, part: Part) -> bool:
        return bool(part.text) and not (part.reasoning and self._mode is ReasoningMode.CLOSED)

    def _walk(self, text: str) -> Iterator[Part]:
        while True:
            tags = (_CLOSE, _OPEN, _CALL) if self._inside else (_OPEN, _CLOSE)
            position, tag = first_tag(text, tags)
            if position < 0:
                break
            inside = self._inside
            body = text[:position].rstrip() if inside else text[:position]
            yield Part(self._trimmed(body), inside)
            self._inside = tag == _OPEN
            self._trim = tag != _CALL
            text = text[position:] if tag == _CALL else text[position + len(tag) :]
        text = self._trimmed(text)
        keep = partial_tag(text, tags)
        if self._inside:
            # White space in front of `</think>` is markup: it waits until it is known not to be.
            keep = len(text) - len(text[: len(text) - keep].rstrip())
        self._held = text[len(text) - keep :]
        yield Part(text[: len(text) - keep], self._inside)

    def _trimmed(self, text: str) -> str:
        if not self._trim:
            return text
        text = text.lstrip("\n")
        self._trim = not text
        return text
