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
# Steps of each depth in turn: first some that find out how many threads pay, then rounds of one
# that pays for the change and some that are timed. In rounds, since a machine has slow moments.
EXPLORED, ROUNDS, TIMED = 4, 2, 2
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
    for width in WIDTHS:
        tokens = _tokens_needed(policy.num_drafts)
        room = width * -(-tokens // GRID) <= kv_blocks and tokens <= config.max_seq_len
        wide = width > min(config.max_batch_size, policy.mtp_max_seqs)
        if wide or not room or clock() - began > LIMIT:
            break
        core = EngineCore(
            replace(config, prefix_caching=False), runner, kv_blocks=kv_blocks, clock=clock
        )
        costs[width] = _depths(core, width, runner.vocab_size, policy.num_drafts, explore, clock)
    logger.info(
        "Timed steps of %s sequences in %.1f s: %s",
        ", ".join(map(str, costs)) or "no",
        clock() - began,
        "; ".join(f"{w}: {_milliseconds(seconds)} ms" for w, seconds in costs.items()),
    )
    return costs


def _depths(
    core: EngineCore,
    width: int,
    vocabulary: int,
    num_drafts: int,
    explore: Callable[[bool], None],
    clock: Callable[[], float],
) -> tuple[float, ...]:
    """Seconds of a step of `width` sequences by its depth, 0 to the deepest that is possible."""
    random = Random(0)
    limit = _tokens_needed(num_drafts) - _PROMPT
    sampling = SamplingParams(max_tokens=limit, temperature=0.0, seed=0, ignore_eos=True)
    for number in range(width):
        prompt = tuple(random.randrange(vocabulary) for _ in range(_PROMPT))
        core.add(GenerationRequest(number, prompt, sampling))
    core.pin_depth(0, width)
    while len(core.scheduler.decoding()) < width:
        core.step()
    depths: list[int] = []
    explore(True)
    for depth in range(num_drafts + 1):
        if core.pin_depth(depth, width) < depth:
            break  # the slots cannot verify as many
        depths.append(depth)
        for _ in range(EXPLORED):
            core.step()
    explore(False)
    # The least: what else runs while a server starts is no cost of a depth.
    found = [math.inf] * len(depths)
    for _ in range(ROUNDS):
        for depth in depths:
            core.pin_depth(depth, width)
            core.step()
            for _ in range(TIMED):
                start = clock()
                core.step()
                found[depth] = min(found[depth], clock() - start)
    core.abort_all()
    core.step()
    return tuple(found)


def _tokens_needed(num_drafts: int) -> int:
    """Prompt and output of a sequence that accepts every draft, with a little to spare."""
    steps = EXPLORED + ROUNDS * (1 + TIMED)
    return _PROMPT + 2 + sum(steps * (depth + 1) for depth in range(num_drafts + 1)) + num_drafts


def _milliseconds(seconds: tuple[float, ...]) -> str:
    return " ".join(f"{1e3 * s:.1f}" for s in seconds)
