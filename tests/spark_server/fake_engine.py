"""An engine client without an engine: scripted ids, delays, bursts and failures.

Knows no model; tests say which ids follow which prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.request import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestStats,
    TokenDelta,
    TokenLogprobs,
)
from spark_server.engine_api import EngineState, ModelInfo


@dataclass
class Script:
    """What one request gets.

    Attributes:
        ids: the tokens; what follows after them is `fill`, for as long as the request asks.
        burst: tokens per delta.
        delay: seconds before each delta.
        first_delay: seconds before the first one, as a full queue would cause.
        refuse: raised before the first delta.
        fail_after: tokens after which the engine fails, or None.
        fill: id that goes on after `ids`, or None to end with the end id.
        cached: prompt tokens that it says were cached.
    """

    ids: Sequence[int] = ()
    burst: int = 1
    delay: float = 0.0
    first_delay: float = 0.0
    refuse: Exception | None = None
    fail_after: int | None = None
    fill: int | None = None
    cached: int = 0


@dataclass
class FakeEngine:
    """Implements `EngineClient`; `seen` and `aborted` say what happened."""

    model: ModelInfo | None
    script: Callable[[GenerationRequest], Script] = lambda request: Script()
    now: EngineState = EngineState.READY
    stalled: float = 0.0
    table: Mapping[str, object] | None = None
    seen: list[GenerationRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    running: int = 0

    def state(self) -> EngineState:
        return self.now

    def age(self) -> float:
        return self.stalled

    def stats(self) -> EngineStats | None:
        return EngineStats(running=self.running)

    def ledger(self) -> Mapping[str, object] | None:
        return self.table

    def info(self) -> ModelInfo | None:
        return self.model

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        self.seen.append(request)
        script = self.script(request)
        if script.refuse is not None:
            raise script.refuse
        finished = False
        self.running += 1
        try:
            await asyncio.sleep(script.first_delay)
            for delta in self._deltas(request, script):
                await asyncio.sleep(script.delay)
                finished = delta.finish_reason is not None
                yield delta
        finally:
            self.running -= 1
            if not finished:
                self.aborted.append(request.request_id)

    def _deltas(self, request: GenerationRequest, script: Script) -> list[TokenDelta]:
        assert self.model is not None
        params = request.sampling
        ends = frozenset(() if params.ignore_eos else self.model.eos_token_ids)
        stops = ends | set(params.stop_token_ids)
        end = min(self.model.eos_token_ids)
        ids: list[int] = []
        source = list(script.ids)
        while len(ids) < params.max_tokens:
            if source:
                ids.append(source.pop(0))
            else:
                ids.append(end if script.fill is None else script.fill)
            if ids[-1] in stops and len(ids) > params.min_tokens:
                break
        stopped = bool(ids) and ids[-1] in stops and len(ids) > params.min_tokens
        deltas: list[TokenDelta] = []
        for start in range(0, len(ids), script.burst):
            burst = tuple(ids[start : start + script.burst])
            if script.fail_after is not None and start >= script.fail_after:
                deltas.append(
                    TokenDelta(
                        request_id=request.request_id,
                        finish_reason=FinishReason.ERROR,
                        error="the engine process ended",
                        error_status=503,
                    )
                )
                return deltas
            last = start + script.burst >= len(ids)
            stats = RequestStats(0.25, 0, script.cached, drafted=3, accepted=2)
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            deltas.append(
                TokenDelta(
                    request_id=request.request_id,
                    token_ids=burst,
                    logprobs=self._logprobs(params.logprobs, burst),
                    finish_reason=reason if last else None,
                    stop_token_id=ids[-1] if last and stopped else None,
                    stats=stats if last else None,
                )
            )
        return deltas

    @staticmethod
    def _logprobs(count: int | None, burst: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        if count is None:
            return ()
        return tuple(
            TokenLogprobs(-0.5, tuple((i + n, -0.5 - n) for n in range(count))) for i in burst
        )
