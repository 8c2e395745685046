"""One request and what it was like: status, tokens from usage, and the time of every piece of text.

Knows OpenAI's stream shape, not who sends how many requests when.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.load.wire import Connection, Target, WireError

TEXT_FIELDS = ("content", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Job:
    """What to ask: `path` is /v1/completions or /v1/chat/completions, `body` is OpenAI's."""

    path: str
    body: Mapping[str, object]
    expect_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. Times in seconds; `gaps` lie between pieces of text, not between tokens."""

    seconds: float
    ttft: float | None = None
    gaps: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class _Stream:
    """Splits a body into events. Only the first text and the usage are parsed as JSON."""

    started: float
    buffer: bytearray = field(default_factory=bytearray)
    raw: bytearray = field(default_factory=bytearray)
    ttft: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    usage: Mapping[str, int] | None = None
    error: str | None = None
    done: bool = False

    def feed(self, data: bytes, now: float) -> None:
        buffer = self.buffer
        buffer += data
        if b"\r" in data:
            buffer[:] = buffer.replace(b"\r\n", b"\n")
        while (end := buffer.find(b"\n\n")) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            if event.startswith(b"data:"):
                self._event(event[5:].strip(), now)
            elif not event.startswith(b":"):
                self.raw += event

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
        elif b'"error"' in data[:60]:
            self.error = _error_text(data)
        elif b'"choices":[]' in data or b'"choices": []' in data:
            usage = json.loads(data).get("usage")
            self.usage = usage if isinstance(usage, dict) else None
        elif self.ttft is None:
            if _has_text(data):
                self.ttft, self.last = now - self.started, now
        elif b'"finish_reason":"' not in data and b'"finish_reason": "' not in data:
            self.gaps.append(now - self.last)
            self.last = now


async def ask(connection: Connection, target: Target, job: Job) -> Sample:
    """Stream one completion and measure it; never raises for what the server does."""
    body = dict(job.body) | {"stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(body, separators=(",", ":")).encode()
    stream = _Stream(time.perf_counter())
    status, broken = 0, None
    try:
        head = target.head("POST", job.path, len(payload))
        status = await connection.request(head, payload, stream.feed)
    except WireError as error:
        broken = str(error)
    seconds = time.perf_counter() - stream.started
    usage = stream.usage or {}
    tokens = usage.get("completion_tokens", 0)
    return Sample(
        seconds=seconds,
        ttft=stream.ttft,
        gaps=tuple(stream.gaps),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=tokens,
        error=broken or _verdict(status, stream, job.expect_tokens, tokens),
    )


def _verdict(status: int, stream: _Stream, expected: int | None, tokens: int) -> str | None:
    """A sentence that says what was wrong with the answer, or None."""
    if status != 200:
        return f"HTTP {status}: {_error_text(bytes(stream.raw + stream.buffer))}"
    if stream.error is not None:
        return stream.error
    if not stream.done:
        return "the stream ended without [DONE]"
    if stream.usage is None:
        return "the stream carried no usage"
    if expected is not None and tokens != expected:
        return f"{tokens} tokens came where {expected} were asked for with --ignore-eos"
    return None


def _has_text(data: bytes) -> bool:
    choice = json.loads(data)["choices"][0]
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(name) for name in TEXT_FIELDS)


def _error_text(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return data.decode("utf-8", "replace")[:200]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value with at least `share` of all values at or below it; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
