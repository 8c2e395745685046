"""What the JSON of all answers shares: chunks, token counts, per-request numbers.

Chunks are bytes put together from parts that are encoded once per request, since they are written
thousands of times a second. Knows nothing of engines or sockets.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from engine.request import TokenLogprobs
from spark_server.api.generation import ChoiceDelta, ChoiceRun
from spark_server.text.reply import Piece

# JSON has no -Infinity; this is what OpenAI sends for a probability of zero.
_LOWEST_LOGPROB = -9999.0
encode = msgspec.json.encode
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
    cached, prompt = 0, None
    for run in runs:
        # As the prompt, what was cached of it counts once: for the first of its choices.
        if run.request.prompt_ids is not prompt and run.stats is not None:
            cached += run.stats.cached_tokens
        prompt = run.request.prompt_ids
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
        "rollbacks": stats.rollbacks if stats else 0,
        "retracted_tokens": stats.retracted if stats else 0,
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
        if delta.restart:
            for part in (self.pieces, self.token_ids, self.logprobs):
                part.clear()
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


def logprob(value: float) -> float:
    """A log-probability that JSON can carry."""
    return value if value > _LOWEST_LOGPROB else _LOWEST_LOGPROB


class Frame:
    """What all chunks of one answer share."""

    def __init__(self, prefix: str, kind: str, model: str, *, with_usage: bool) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.kind = kind
        self.model = model
        head = {"id": self.id, "object": kind, "created": self.created, "model": model}
        # `{...` without its closing brace, to which choices and usage are added.
        self.head = b"data: " + encode(head)[:-1]
        self.tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice."""
        return self.head + b',"choices":[' + encode(choice) + b"]" + self.tail

    def usage_chunk(self, counts: dict[str, Any]) -> bytes:
        """The event with no choice and the counts."""
        return self.head + b',"choices":[],"usage":' + encode(counts) + b"}\n\n"
