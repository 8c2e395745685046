"""The seam between the HTTP API and whatever runs the engine: protocols and plain frozen values.

Knows nothing of HTTP, processes or metrics libraries; `engine_client` implements `EngineClient`,
`metrics` implements `RequestObserver`, and tests implement both with a few lines.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.request import EngineStats, GenerationRequest, RequestStats, TokenDelta


class EngineState(StrEnum):
    """What the engine is doing. Only `READY` takes new requests.

    LOADING: not up yet, or being restarted. DRAINING: finishes what runs, admits nothing.
    DEAD: gone, with no restart under way. STUCK: work is running and nothing moves.
    """

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API must know of the loaded model.

    Attributes:
        model_id: the name under which the model is served.
        vocab_size: rows of the model's embedding, padding included; every id must lie below it.
        max_seq_len: prompt and output tokens of one sequence.
        max_batch_size: sequences that run at once.
        eos_token_ids: ids that end a sequence unless `ignore_eos`.
        max_waiting: requests that may queue.
        grammar: whether `GenerationRequest.grammar` is understood.
        created: Unix time at which the model was loaded.
    """

    model_id: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    eos_token_ids: tuple[int, ...]
    max_waiting: int = 1024
    grammar: bool = False
    created: int = 0


class EngineClient(Protocol):
    """Where the API sends requests. Every method but `generate` answers at once, from memory."""

    def state(self) -> EngineState:
        """What the engine is doing now."""
        ...

    def age(self) -> float:
        """Seconds without progress while work is running; 0 when idle."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """An async generator of what the request produces; its last delta has a finish_reason.

        Closing it (`aclose`, or cancellation of the task that reads it) aborts the request.

        Raises:
            RequestError, QueueFullError, EngineUnavailableError: before the first delta.
        """
        ...

    def stats(self) -> EngineStats | None:
        """Gauges of the last step, or None while there are none."""
        ...

    def ledger(self) -> Mapping[str, object] | None:
        """The memory ledger as JSON values, or None while there is none."""
        ...

    def info(self) -> ModelInfo | None:
        """The loaded model, or None before the first load is done."""
        ...


class Endpoint(StrEnum):
    """Route templates that generate; a closed set, fit for metric labels."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Outcome(StrEnum):
    """How a request ended; a closed set, fit for metric labels.

    REJECTED: refused before the engine took it (4xx). UNAVAILABLE: the engine took no work (503).
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"
    UNAVAILABLE = "unavailable"


class RequestObserver(Protocol):
    """Accounting of generating requests, called on the event loop; must be quick and never raise.

    `key` is made by the server, one per sequence (a request with `n` choices has n keys). A key
    sees `on_start` once, then `on_first_token` at most once, `on_tokens` any number of times and
    `on_finish` exactly once. A request that is refused before it has sequences is reported as one
    key with `on_start` and `on_finish(REJECTED or UNAVAILABLE)`.
    """

    def on_start(self, key: int, endpoint: Endpoint, streaming: bool) -> None:
        """A sequence is about to be handed to the engine."""
        ...

    def on_first_token(self, key: int, seconds: float) -> None:
        """The first token arrived `seconds` after the HTTP request did."""
        ...

    def on_tokens(self, key: int, count: int, seconds: float) -> None:
        """`count` further tokens (never the first) came `seconds` after the ones before them."""
        ...

    def on_finish(
        self,
        key: int,
        outcome: Outcome,
        prompt_tokens: int,
        completion_tokens: int,
        seconds: float,
        stats: RequestStats | None,
    ) -> None:
        """The sequence ended `seconds` after the HTTP request came, whatever the outcome.

        `completion_tokens` are all that came, also those that were taken back.
        """
        ...


class MetricsPage(Protocol):
    """Renders the metrics page."""

    def __call__(self, accept: str) -> tuple[bytes, str]:
        """Body and content type that fit the scraper's Accept header (may be empty)."""
        ...
