"""Times steps of every depth at some widths before the first request, so that none pays for it.

It runs an engine of its own over the loaded model and leaves nothing behind but what it found.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

from engine.config import GRID, EngineConfig
from engine.core import EngineCore
from engine.request import GenerationRequest, SamplingParams
from engine.runner import ModelRunner
from engine.speculation.controller import Costs

logger = logging.getLogger(__name__)

# Sequences; the costs of widths between them are interpolated.
WIDTHS = (1, 2, 4, 8, 16, 32)
# Seconds after which no further width is begun.
LIMIT = 2.0
# Steps of each depth: first some that find out how many threads pay, then in every sweep over the
# widths one that pays for the change and some that are timed. A machine has slow moments, half a
# second long at times: the least of two sweeps is free of one.
EXPLORED, SWEEPS, TIMED = 4, 2, 2
_PROMPT = 4


def calibrate(
    config: EngineConfig,
    runner: ModelRunner,
    kv_blocks: int,
    explore: Callable[[bool], None] = lambda on: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Seconds of steps by width and depth; empty when nothing follows the clock.

    Every slot and block must be free, and is free again afterwards.

    Args:
        config: of the engine that is about to serve.
        runner: its model.
        kv_blocks: of its pool.
        explore: told True before steps that may try what is fastest, False before those that are
            timed.
        clock: seconds.
    """
    policy = config.speculation
    if policy is None or not policy.controller_acts:
        return {}
    began = clock()
    costs: dict[int, tuple[float, ...]] = {}
    tokens = _tokens_needed(policy.num_drafts)
    for sweep in range(SWEEPS):
        for width in WIDTHS:
            room = width * -(-tokens // GRID) <= kv_blocks and tokens <= config.max_seq_len
            wide = width > min(config.max_batch_size, policy.mtp_max_seqs)
            if wide or not room or clock() - began > LIMIT:
                break
            core = EngineCore(
                replace(config, prefix_caching=False), runner, kv_blocks=kv_blocks, clock=clock
            )
            _begin(core, width, runner.vocab_size, tokens - _PROMPT)
            explored = _depths(core, width, policy.num_drafts, explore if sweep == 0 else None)
            found = _timed(core, width, explored, clock)
            before = costs.get(width, found)
            # The least: what else runs while a server starts is no cost of a depth.
            costs[width] = tuple(map(min, before, found))
            core.abort_all()
            core.step()
    logger.info(
        "Timed steps of %s sequences in %.1f s: %s",
        ", ".join(map(str, costs)) or "no",
        clock() - began,
        "; ".join(f"{w}: {_milliseconds(seconds)} ms" for w, seconds in costs.items()),
    )
    return costs


def _begin(core: EngineCore, width: int, vocabulary: int, limit: int) -> None:
    """Let `width` sequences decode, none of which ends within `limit` tokens."""
    random = Random(0)
    sampling = SamplingParams(max_tokens=limit, temperature=0.0, seed=0, ignore_eos=True)
    for number in range(width):
        prompt = tuple(random.randrange(vocabulary) for _ in range(_PROMPT))
        core.add(GenerationRequest(number, prompt, sampling))
    core.pin_depth(0, width)
    while len(core.scheduler.decoding()) < width:
        core.step()


def _depths(
    core: EngineCore, width: int, num_drafts: int, explore: Callable[[bool], None] | None
) -> int:
    """How many depths from 0 on are possible; steps of each are run if there is to explore."""
    if explore is not None:
        explore(True)
    depth = 0
    while depth <= num_drafts and core.pin_depth(depth, width) == depth:
        for _ in range(EXPLORED if explore is not None else 0):
            core.step()
        depth += 1
    if explore is not None:
        explore(False)
    return depth


def _timed(
    core: EngineCore, width: int, depths: int, clock: Callable[[], float]
) -> tuple[float, ...]:
    """Least seconds of a step of `width` sequences by its depth, of those below `depths`."""
    found = [math.inf] * depths
    for depth in range(depths):
        core.pin_depth(depth, width)
        core.step()
        for _ in range(TIMED):
            start = clock()
            core.step()
            found[depth] = min(found[depth], clock() - start)
    return tuple(found)


def _tokens_needed(num_drafts: int) -> int:
    """Prompt and output of a sequence that accepts every draft, with a little to spare."""
    steps = EXPLORED + 1 + TIMED
    return _PROMPT + 2 + sum(steps * (depth + 1) for depth in range(num_drafts + 1)) + num_drafts


def _milliseconds(seconds: tuple[float, ...]) -> str:
    return " ".join(f"{1e3 * s:.1f}" for s in seconds)
