"""The JSON of answers: whole bodies and stream chunks of both generating endpoints.

Chunks are bytes put together from parts that are encoded once per request, since they are written
thousands of times a second. Knows nothing of engines or sockets.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from engine.request import TokenLogprobs
from spark_server.api.generation import ChoiceDelta, ChoiceRun
from spark_server.text.calls import CallArguments, CallStart, Text
from spark_server.text.reply import Piece, Reasoning

# JSON has no -Infinity; this is what OpenAI sends for a probability of zero.
_LOWEST_LOGPROB = -9999.0
_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"

TokenBytes = Callable[[int], bytes]


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def usage(runs: Sequence[ChoiceRun], prompt_tokens: int) -> dict[str, Any]:
    """Token counts of a request: each prompt once, the outputs of all choices.

    Args:
        prompt_tokens: sum over prompts, not over choices.
    """
    completion = sum(run.completion_tokens for run in runs)
    cached = max((run.stats.cached_tokens for run in runs if run.stats), default=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics(run: ChoiceRun) -> dict[str, Any]:
    """What `"metrics": true` adds to a choice; seconds and tokens per second."""
    stats = run.stats
    total = run.ended or 0.0
    first = run.first_token or 0.0
    steady = run.completion_tokens - 1
    return {
        "queue_seconds": stats.queue_seconds if stats else None,
        "time_to_first_token_seconds": first,
        "total_seconds": total,
        "tokens_per_second": steady / (total - first) if steady > 0 and total > first else None,
        "preemptions": stats.preemptions if stats else 0,
        "cached_tokens": stats.cached_tokens if stats else 0,
        "drafted_tokens": stats.drafted if stats else 0,
        "accepted_tokens": stats.accepted if stats else 0,
        "drafted_per_position": list(stats.drafted_per_position) if stats else [],
        "accepted_per_position": list(stats.accepted_per_position) if stats else [],
    }


@dataclass(slots=True)
class Collected:
    """All that one choice gave, for an answer that is not streamed."""

    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Append one delta."""
        self.pieces.extend(delta.pieces)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish = delta.finish or self.finish


class Format(Protocol):
    """How one endpoint writes its answer."""

    def opening(self, index: int) -> bytes:
        """Events of a choice before its first delta; may be empty."""
        ...

    def events(self, delta: ChoiceDelta, run: ChoiceRun) -> bytes:
        """Events of one delta."""
        ...

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        """The event with token counts and no choices."""
        ...

    def body(
        self, collected: Sequence[Collected], runs: Sequence[ChoiceRun], counts: dict[str, Any]
    ) -> bytes:
        """The whole answer."""
        ...


def _logprob(value: float) -> float:
    return value if value > _LOWEST_LOGPROB else _LOWEST_LOGPROB


class _Frame:
    """What all chunks of one answer share."""

    def __init__(self, prefix: str, kind: str, model: str, *, with_usage: bool) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.kind = kind
        self.model = model
        head = {"id": self.id, "object": kind, "created": self.created, "model": model}
        # `{...` without its closing brace, to which choices and usage are added.
        self.head = b"data: " + _encode(head)[:-1]
        self.tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice."""
        return self.head + b',"choices":[' + _encode(choice) + b"]" + self.tail

    def usage_chunk(self, counts: dict[str, Any]) -> bytes:
        """The event with no choice and the counts."""
        return self.head + b',"choices":[],"usage":' + _encode(counts) + b"}\n\n"


class ChatFormat:
    """chat.completion and chat.completion.chunk.

    Args:
        choices: number of choices, for the parts that are encoded once.
        with_usage: a usage chunk will come, so all others say `usage: null`.
        with_metrics: add `metrics` to each finished choice.
    """

    def __init__(
        self,
        model: str,
        choices: int,
        token_bytes: TokenBytes,
        *,
        with_usage: bool,
        with_metrics: bool,
    ) -> None:
        self._frame = _Frame("chatcmpl", "chat.completion.chunk", model, with_usage=with_usage)
        self._token_bytes = token_bytes
        self._metrics = with_metrics
        self._call_ids: dict[tuple[int, int], str] = {}
        self._heads = [
            self._frame.head + b',"choices":[{"index":%d,"delta":{"content":' % index
            for index in range(choices)
        ]
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + self._frame.tail

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def events(self, delta: ChoiceDelta, run: ChoiceRun) -> bytes:
        pieces = delta.pieces
        if len(pieces) == 1 and not delta.logprobs and delta.finish is None:
            piece = pieces[0]
            if type(piece) is Text:
                return self._heads[delta.index] + _encode(piece.text) + self._tail
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.logprobs else None
        parts: list[bytes] = []
        for change in self._changes(delta.index, pieces):
            parts.append(self._chunk(delta.index, change, logprobs))
            logprobs = None
        if logprobs is not None:
            parts.append(self._chunk(delta.index, {"content": ""}, logprobs))
        if delta.finish is not None:
            parts.append(self._chunk(delta.index, {}, None, delta.finish, run))
        return b"".join(parts)

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        return self._frame.usage_chunk(counts)

    def body(
        self, collected: Sequence[Collected], runs: Sequence[ChoiceRun], counts: dict[str, Any]
    ) -> bytes:
        choices = []
        for index, (parts, run) in enumerate(zip(collected, runs, strict=True)):
            logprobs = self._logprobs(parts.token_ids, parts.logprobs) if parts.logprobs else None
            choice = {
                "index": index,
                "message": self._message(index, parts.pieces),
                "logprobs": logprobs,
                "finish_reason": parts.finish,
            }
            if self._metrics:
                choice["metrics"] = metrics(run)
            choices.append(choice)
        return _encode(
            {
                "id": self._frame.id,
                "object": "chat.completion",
                "created": self._frame.created,
                "model": self._frame.model,
                "choices": choices,
                "usage": counts,
            }
        )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        run: ChoiceRun | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if self._metrics and run is not None:
            choice["metrics"] = metrics(run)
        return self._frame.chunk(choice)

    def _call_id(self, index: int, call: int) -> str:
        return self._call_ids.setdefault((index, call), f"call_{secrets.token_hex(12)}")

    def _changes(self, index: int, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        """One `delta` object per run of pieces of a kind."""
        for text, group in _joined(pieces):
            if group is Text:
                yield {"content": text}
            elif group is Reasoning:
                yield {"reasoning_content": text}
            elif isinstance(group, CallStart):
                yield {
                    "tool_calls": [
                        {
                            "index": group.index,
                            "id": self._call_id(index, group.index),
                            "type": "function",
                            "function": {"name": group.name, "arguments": ""},
                        }
                    ]
                }
            elif isinstance(group, CallArguments):
                call = {"index": group.index, "function": {"arguments": text}}
                yield {"tool_calls": [call]}

    def _message(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                function = {"name": piece.name, "arguments": ""}
                call_id = self._call_id(index, piece.index)
                calls.append({"id": call_id, "type": "function", "function": function})
            elif isinstance(piece, CallArguments):
                calls[piece.index]["function"]["arguments"] += piece.fragment
        empty = None if calls or reasoning else ""
        message: dict[str, Any] = {"role": "assistant", "content": content or empty}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        content = [
            {
                **self._entry(token_id, entry.logprob),
                "top_logprobs": [self._entry(other, value) for other, value in entry.top],
            }
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        data = self._token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": _logprob(value),
            "bytes": list(data),
        }


def _joined(pieces: Sequence[Piece]) -> Iterator[tuple[str, Any]]:
    """Neighbours of a kind as one: (text, Text | Reasoning | the call event)."""
    held: tuple[str, Any] | None = None
    for piece in pieces:
        text: str
        group: Any
        if isinstance(piece, (Text, Reasoning)):
            text, group = piece.text, type(piece)
        elif isinstance(piece, CallArguments):
            text, group = piece.fragment, piece
        else:
            text, group = "", piece
        if held is not None and _same(held[1], group):
            held = (held[0] + text, held[1])
            continue
        if held is not None:
            yield held
        held = (text, group)
    if held is not None:
        yield held


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, CallArguments) and isinstance(right, CallArguments):
        return left.index == right.index
    return isinstance(left, type) and left is right


class CompletionFormat:
    """text_completion, whole and streamed.

    Args:
        echoes: text to put in front of each choice; empty strings without `echo`.
    """

    def __init__(
        self,
        model: str,
        echoes: Sequence[str],
        token_bytes: TokenBytes,
        *,
        with_usage: bool,
        with_metrics: bool,
    ) -> None:
        self._frame = _Frame("cmpl", "text_completion", model, with_usage=with_usage)
        self._echoes = echoes
        self._token_bytes = token_bytes
        self._metrics = with_metrics
        self._offsets = [len(echo) for echo in echoes]
        self._heads = [
            self._frame.head + b',"choices":[{"index":%d,"text":' % index
            for index in range(len(echoes))
        ]
        self._tail = b',"logprobs":null,"finish_reason":null}]' + self._frame.tail

    def opening(self, index: int) -> bytes:
        echo = self._echoes[index]
        return self._heads[index] + _encode(echo) + self._tail if echo else b""

    def events(self, delta: ChoiceDelta, run: ChoiceRun) -> bytes:
        text = _text(delta.pieces)
        if not delta.logprobs and delta.finish is None:
            return self._heads[delta.index] + _encode(text) + self._tail if text else b""
        logprobs = None
        if delta.logprobs:
            logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs)
        return self._frame.chunk(self._choice(delta.index, text, logprobs, delta.finish, run))

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        return self._frame.usage_chunk(counts)

    def body(
        self, collected: Sequence[Collected], runs: Sequence[ChoiceRun], counts: dict[str, Any]
    ) -> bytes:
        choices = []
        for index, (parts, run) in enumerate(zip(collected, runs, strict=True)):
            text = self._echoes[index] + _text(parts.pieces)
            logprobs = None
            if parts.logprobs:
                logprobs = self._logprobs(index, parts.token_ids, parts.logprobs)
            choices.append(self._choice(index, text, logprobs, parts.finish, run))
        return _encode(
            {
                "id": self._frame.id,
                "object": "text_completion",
                "created": self._frame.created,
                "model": self._frame.model,
                "choices": choices,
                "usage": counts,
            }
        )

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish: str | None,
        run: ChoiceRun,
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self._metrics and finish is not None:
            choice["metrics"] = metrics(run)
        return choice

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        tokens = [self._name(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_logprob(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                {self._name(other): _logprob(value) for other, value in entry.top}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        """A token's text; one that is no whole character is spelled in bytes, as OpenAI does."""
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))
