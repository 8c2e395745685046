"""Engines of random weights through the server's own build, and their decode steps one by one."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu.forced import ForcedRunner
from benchmarks.gpu.geometries import geometry
from benchmarks.gpu.options import Options
from benchmarks.gpu.weights import RandomWeights
from engine.build import DTYPES, BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import InvariantError
from engine.request import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from engine.weights.model_config import ModelConfig, parse_config

# Short prompts: what a long context costs is measured kernel by kernel.
PROMPT = 64
WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Steps:
    """What some decode steps of one width took.

    Attributes:
        seconds: median of a step, drafting for the next one included.
        tokens: emitted in all of them.
        accepted: drafts that came true, of `drafted`.
        state_bytes: recurrent state moved per step.
        count: of steps.
        context: tokens of a sequence in the middle of them, about.
        waits: of the host for the card in one more step, as torch sees them; 0 on a CPU.
    """

    seconds: float
    tokens: int
    accepted: int
    drafted: int
    state_bytes: float
    count: int
    context: int
    waits: int


def model_of(name: str) -> ModelConfig:
    """The config of a geometry, with its drafter."""
    return parse_config(geometry(name))


def speculation(mode: SsmRollbackMode, width: int, drafts: int) -> PolicySettings:
    """Always `drafts` drafts, up to `width` sequences, all of which may speculate."""
    return PolicySettings(
        num_drafts=drafts,
        rollback=mode,
        ladder_disabled=True,
        mtp_max_seqs_override=width,
        pool_full_width=True,
        dcut_off=True,
        controller=ControllerMode.OFF,
    )


def engine_config(options: Options, width: int, length: int, dtype: str) -> EngineConfig:
    """Sizes for `width` sequences of `length` tokens; nine tenths of what the device has free."""
    return EngineConfig(
        model_dir="",
        device=options.device,
        dtype=dtype,
        max_batch_size=width,
        max_seq_len=length,
        max_prefill_tokens=min(64 * width, 4096),
        memory_budget=int(0.9 * _free_bytes(options.device)),
        kv_tokens=width * length,
        threads=1 if options.device == "cpu" else 0,
        kernels=options.kernels,
        # Repeated prompts must be computed, and repeated output must go on.
        prefix_caching=False,
        watchdogs=False,
        decode_ring_slots=0,
    )


@contextmanager
def built(model: str | Mapping[str, Any], config: EngineConfig) -> Iterator[BuiltEngine]:
    """An engine of random weights in the shapes of a geometry, by name or as a config.json."""
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        shapes = geometry(model) if isinstance(model, str) else model
        path.write_text(json.dumps(shapes), encoding="utf-8")
        yield build_engine(
            replace(config, model_dir=folder),
            lambda phase, seconds, detail="": None,
            source=lambda model: RandomWeights(model, device, dtype),
        )


def forced_core(engine: BuiltEngine, config: EngineConfig, acceptance: float) -> EngineCore:
    """A core over the engine's model that accepts drafts with the given chance."""
    runner = ForcedRunner(engine.model, acceptance)
    return EngineCore(config, runner, kv_blocks=engine.ledger.kv_blocks)


def timed_steps(core: EngineCore, width: int, steps: int) -> Steps:
    """Prefill `width` sequences, let them decode together, and end them.

    Every step ends with its tokens on the host, so that a host clock tells the truth.

    Raises:
        InvariantError: a sequence failed or ended, so that the width was not kept.
    """
    for number in range(width):
        core.add(request(number))
    while len(core.scheduler.decoding()) < width:
        _step(core)
    for _ in range(WARM_STEPS):
        _step(core)
    before, times, tokens = _Counters.of(core), [], 0
    for _ in range(steps):
        start = time.perf_counter()
        tokens += _step(core)
        times.append(time.perf_counter() - start)
    after = _Counters.of(core)
    if after.running != width:
        raise InvariantError(f"{after.running} of {width} sequences still decode")
    waits = _host_waits(core)
    core.abort_all()
    while core.has_work():
        core.step()
    return Steps(
        seconds=statistics.median(times),
        tokens=tokens,
        accepted=after.accepted - before.accepted,
        drafted=after.drafted - before.drafted,
        state_bytes=(after.state_bytes - before.state_bytes) / steps,
        count=steps,
        context=PROMPT + (WARM_STEPS * tokens + steps * tokens // 2) // (steps * width),
        waits=waits,
    )


def request(number: int, prompt: int = PROMPT, max_tokens: int = 1 << 20) -> GenerationRequest:
    """A greedy request of `prompt` tokens that differ by number; no end id ends it."""
    ids = tuple((7 + 31 * number + 13 * i) % 251 for i in range(prompt))
    return GenerationRequest(
        number, ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    )


def generate(core: EngineCore, requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
    """The tokens of all requests, which run together, in their order.

    Raises:
        InvariantError: one of them failed.
    """
    tokens: dict[int, list[int]] = {r.request_id: [] for r in requests}
    for one in requests:
        core.add(one)
    while core.has_work():
        for delta in core.step():
            _expect_no_error(delta)
            tokens[delta.request_id] += delta.token_ids
    return [tuple(tokens[r.request_id]) for r in requests]


@dataclass(frozen=True, slots=True)
class _Counters:
    running: int
    drafted: int
    accepted: int
    state_bytes: int

    @classmethod
    def of(cls, core: EngineCore) -> _Counters:
        spec = core.stats().speculation
        running = len(core.scheduler.decoding())
        if spec is None:
            return cls(running, 0, 0, 0)
        return cls(running, spec.draft_tokens, spec.accepted_tokens, spec.state_bytes)


def _step(core: EngineCore) -> int:
    """One step; the tokens that it gave."""
    deltas = core.step()
    for delta in deltas:
        _expect_no_error(delta)
    return sum(len(delta.token_ids) for delta in deltas)


def _host_waits(core: EngineCore) -> int:
    """Synchronising calls of one step, counted by the warnings that torch gives on request."""
    if not torch.cuda.is_initialized():
        return 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _step(core)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def _expect_no_error(delta: TokenDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise InvariantError(f"request {delta.request_id} failed: {delta.error}")


def free(device: str) -> None:
    """Give the memory of engines that nobody holds any more back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
