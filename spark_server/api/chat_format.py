"""The JSON of chat answers: chat.completion, and chat.completion.chunk for streams.

Knows nothing of engines or sockets.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from engine.request import TokenLogprobs
from spark_server.api.formats import Collected, Frame, TokenBytes, encode, logprob, metrics
from spark_server.api.generation import ChoiceDelta, ChoiceRun
from spark_server.text.calls import CallArguments, CallStart, Text
from spark_server.text.reply import Piece, Reasoning


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
        self._frame = Frame("chatcmpl", "chat.completion.chunk", model, with_usage=with_usage)
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
                return self._heads[delta.index] + encode(piece.text) + self._tail
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
        return encode(
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
            "logprob": logprob(value),
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
