"""An engine core of a few lines, for tests of the processes around it.

A sequence answers last id + 1, + 2, ...; the first id of a prompt may ask for trouble instead.
Options come from the query of `model_dir` or from FAKE_CORE: `step_ms=5&start=config`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFitError, QueueFullError, RequestError
from engine.request import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestStats,
    TokenDelta,
    TokenLogprobs,
)

VOCAB = 512
RAISE, HANG, EXIT, COMPUTE, REFUSE, FULL = 501, 502, 503, 504, 505, 506


@dataclass
class _Sequence:
    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)


class FakeCore:
    """Steps every sequence by one token; `max_batch_size` run, the others wait."""

    def __init__(self, config: EngineConfig, step_seconds: float) -> None:
        self.config = config
        self.step_seconds = step_seconds
        self.running: list[_Sequence] = []
        self.waiting: list[_Sequence] = []
        self.steps = self.prompt_tokens = self.generation_tokens = 0
        self.last_step = 0.0

    def add(self, request: GenerationRequest) -> None:
        if request.prompt_ids[0] == REFUSE:
            raise RequestError("refused", param="prompt", code="fake", status=400)
        if request.prompt_ids[0] == FULL:
            raise QueueFullError("full", retry_after=7)
        self.waiting.append(_Sequence(request))

    def abort(self, request_id: int) -> None:
        for group in (self.running, self.waiting):
            group[:] = [s for s in group if s.request.request_id != request_id]

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            slots_total=self.config.max_batch_size,
            slots_used=len(self.running),
            kv_blocks_total=100,
            kv_blocks_used=2 * len(self.running),
            steps=self.steps,
            steps_by_kind=(("decode", self.steps),),
            last_step_seconds=self.last_step,
            last_step_rows=len(self.running),
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
        )

    def step(self) -> list[TokenDelta]:
        began = time.perf_counter()
        while self.waiting and len(self.running) < self.config.max_batch_size:
            self.running.append(self.waiting.pop(0))
            self.prompt_tokens += len(self.running[-1].request.prompt_ids)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        deltas = [self._advance(sequence) for sequence in self.running]
        done = {d.request_id for d in deltas if d.finish_reason is not None}
        self.running = [s for s in self.running if s.request.request_id not in done]
        self.steps += 1
        self.last_step = time.perf_counter() - began
        return deltas

    def prepare(self) -> None:
        """It drafts nothing."""

    def _advance(self, sequence: _Sequence) -> TokenDelta:
        request = sequence.request
        _trouble(request.prompt_ids)
        token = (request.prompt_ids[-1] + 1 + len(sequence.tokens)) % VOCAB
        sequence.tokens.append(token)
        self.generation_tokens += 1
        done = len(sequence.tokens) >= request.sampling.max_tokens
        logprobs = request.sampling.logprobs
        return TokenDelta(
            request.request_id,
            (token,),
            () if logprobs is None else (TokenLogprobs(-0.5, ((token, -0.5),)),),
            FinishReason.LENGTH if done else None,
            stats=RequestStats(queue_seconds=0.001) if done else None,
        )


def _trouble(prompt: tuple[int, ...]) -> None:
    if prompt[0] == RAISE:
        raise RuntimeError("asked to raise")
    if prompt[0] == HANG:
        time.sleep(3600)
    if prompt[0] == EXIT:
        os._exit(9)
    if prompt[0] == COMPUTE:
        end = time.monotonic() + prompt[1]
        while time.monotonic() < end:
            pass


@dataclass(frozen=True)
class FakeInfo:
    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class FakeLedger:
    def as_dict(self) -> dict[str, Any]:
        terms = [
            {"name": "weights", "bytes": 1000, "kind": "exact", "why": "fake"},
            {"name": "activations", "bytes": 24, "kind": "estimate", "why": "fake"},
        ]
        return {"total_bytes": 1024, "terms": terms}


@dataclass(frozen=True)
class FakeEngine:
    core: FakeCore
    info: FakeInfo
    ledger: FakeLedger


def build(config: EngineConfig, progress: Callable[..., None]) -> FakeEngine:
    """The factory, as `engine.build:build_engine` is."""
    query = urlsplit(config.model_dir).query or os.environ.get("FAKE_CORE", "")
    options = {key: values[0] for key, values in parse_qs(query).items()}
    match options.get("start"):
        case "config":
            raise ConfigError("--max-batch-size 9 is too much; use 8")
        case "fit":
            raise DoesNotFitError("the ledger of 2 GiB exceeds the budget of 1 GiB")
        case "bug":
            raise ZeroDivisionError("a bug")
        case "exit":
            os._exit(7)
        case "once":
            # The first start works, every later one fails.
            marker = options["marker"]
            if os.path.exists(marker):
                raise ConfigError("the model has gone")
            with open(marker, "w"):
                pass
    time.sleep(float(options.get("start_s", 0)))
    progress("preflight", 0.01)
    progress("weights", 0.02, "1000 bytes")
    return FakeEngine(
        FakeCore(config, float(options.get("step_ms", 0)) / 1000), FakeInfo(), FakeLedger()
    )
