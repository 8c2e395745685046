"""One reply's way from token ids to what the client reads: one machine, fed with deltas.

Detokenizer, stop strings, reasoning and tool calls in this order. A streamed reply writes what the
machine gives, one that is not streamed collects it, so the two cannot differ. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_server.text.calls import CallEnd, Event, Text
from spark_server.text.detokenize import Detokenizer
from spark_server.text.reasoning import Part, ReasoningMode, ReasoningSplitter
from spark_server.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thought."""

    text: str


Piece = Event | Reasoning


class CallParser(Protocol):
    """A parser of tool calls; see `toolparser` and `forced`."""

    def feed(self, text: str) -> list[Event]:
        """Events that became certain with `text`."""
        ...

    def finish(self, *, complete: bool) -> list[Event]:
        """The end of the reply: `complete` when the model ended it, False when it was cut."""
        ...


@dataclass(frozen=True, slots=True)
class Fed:
    """What a few tokens gave: pieces, how many of the tokens count, and whether the reply ends."""

    pieces: list[Piece]
    consumed: int
    done: bool


class Reply:
    """The machine of one choice.

    `min_tokens` wins over stop strings: the text of the first `min_tokens` tokens is released
    without looking for them, so a stop string can only match in what comes after.

    Args:
        parser: finds tool calls, or None when no tools are in play.
        one_call: the reply ends with its first complete call (`parallel_tool_calls: false`).
        calls_finish: calls turn a finish reason `stop` into `tool_calls`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        reasoning: ReasoningMode = ReasoningMode.NONE,
        parser: CallParser | None = None,
        one_call: bool = False,
        calls_finish: bool = True,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._splitter = None if reasoning is ReasoningMode.NONE else ReasoningSplitter(reasoning)
        self._parser = parser
        self._one_call = one_call
        self._calls_finish = calls_finish
        self._called = False
        self._done = False
        self.tokens = 0

    def feed(self, token_ids: Sequence[int], *, hidden_last: bool = False) -> Fed:
        """Take the tokens of one delta.

        Args:
            hidden_last: the last id ended the sequence; it counts but has no text.
        """
        shown = token_ids[:-1] if hidden_last else token_ids
        if not self._has_stops and not self._one_call:
            self.tokens += len(token_ids)
            return Fed(self._text(self._detokenizer.feed(shown)), len(token_ids), False)
        pieces: list[Piece] = []
        # Token by token, so that the count at a match does not depend on the burst.
        for number, token_id in enumerate(token_ids):
            self.tokens += 1
            if number < len(shown):
                pieces.extend(self._text(self._match(self._detokenizer.feed((token_id,)))))
            self._done = self._done or self._stops.stopped
            if self._done:
                return Fed(pieces, number + 1, True)
        return Fed(pieces, len(token_ids), False)

    def finish(self, *, cut: bool, broken_off: bool = False) -> tuple[list[Piece], str]:
        """Flush everything, through all stages.

        Args:
            cut: the sequence ended by its length.
            broken_off: the engine stopped it, so that a call which is open stays open.

        Returns:
            The last pieces and the finish reason: `stop`, `length` or `tool_calls`.
        """
        pieces: list[Piece] = []
        if not self._done:
            tail = self._match(self._detokenizer.finish())
            pieces.extend(self._text(tail))
            pieces.extend(self._text(self._stops.finish()))
        complete = self._stops.stopped or self._done or not cut
        if self._splitter is not None:
            pieces.extend(self._parts(self._splitter.finish()))
        if self._parser is not None and not (self._one_call and self._called):
            pieces.extend(self._events(self._parser.finish(complete=complete and not broken_off)))
        if not complete:
            return pieces, "length"
        return pieces, "tool_calls" if self._called and self._calls_finish else "stop"

    def _match(self, text: str) -> str:
        if not text or self.tokens <= self._min_tokens:
            return text
        return self._stops.feed(text)

    def _text(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._splitter is not None:
            return self._parts(self._splitter.feed(text))
        return self._content(text)

    def _parts(self, parts: list[Part]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            pieces.extend([Reasoning(part.text)] if part.reasoning else self._content(part.text))
        return pieces

    def _content(self, text: str) -> list[Piece]:
        if self._parser is None:
            return [Text(text)]
        return self._events(self._parser.feed(text))

    def _events(self, events: list[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            if self._one_call and self._called:
                break
            pieces.append(event)
            if isinstance(event, CallEnd):
                self._called = True
                self._done = self._done or self._one_call
        return pieces
