"""The JSON of completions: text_completion, whole and in chunks.

Knows nothing of engines or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.request import TokenLogprobs
from spark_server.api.formats import Collected, Frame, TokenBytes, encode, logprob, metrics
from spark_server.api.generation import ChoiceDelta, ChoiceRun
from spark_server.text.calls import Text
from spark_server.text.reply import Piece


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
        self._frame = Frame("cmpl", "text_completion", model, with_usage=with_usage)
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
        return self._heads[index] + encode(echo) + self._tail if echo else b""

    def events(self, delta: ChoiceDelta, run: ChoiceRun) -> bytes:
        text = _text(delta.pieces)
        if not delta.logprobs and delta.finish is None:
            return self._heads[delta.index] + encode(text) + self._tail if text else b""
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
        return encode(
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
            "token_logprobs": [logprob(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                {self._name(other): logprob(value) for other, value in entry.top}
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
