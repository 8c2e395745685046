"""Speculation against no speculation, cell by cell: same tokens, and what the drafts came to.

Every cell is an engine of its own over the packaged model; knows no HTTP. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from pathlib import Path

from benchmarks.tiny.corpus import prose_prompts, tool_prompts
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import FinishReason, GenerationRequest, SamplingParams, SpeculationStats
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from spark_server.text.model import load_text_model

MAX_SEQ_LEN = 192
HEADER = (
    "mode      ladder    clients  batch  slots    drafted accepted rejected partial uncovered  s"
)
Tokens = dict[int, list[int]]

LADDERS: dict[str, PolicySettings] = {
    "default": PolicySettings(num_drafts=3),
    "4:4": PolicySettings(num_drafts=3, ladder_text="4:4"),
    "1:1": PolicySettings(num_drafts=3, ladder_text="1:1"),
    "none": PolicySettings(num_drafts=3, ladder_disabled=True),
    "1:1/64": PolicySettings(num_drafts=3, ladder_text="1:1", mtp_max_seqs_override=64),
    "none/64": PolicySettings(num_drafts=3, ladder_disabled=True, mtp_max_seqs_override=64),
}
CONCURRENCY = (1, 5, 16, 40)
BATCHES = (8, 64)


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix."""

    mode: SsmRollbackMode
    ladder: str
    concurrency: int
    batch: int
    compaction: bool
    controller: ControllerMode = ControllerMode.OFF

    def policy(self) -> PolicySettings:
        """Settings of speculation in this cell."""
        return replace(LADDERS[self.ladder], rollback=self.mode, controller=self.controller)


@dataclass(frozen=True)
class Outcome:
    """Tokens of every request, and the counters; `uncovered_steps` had an uncovered sequence."""

    tokens: Tokens
    stats: SpeculationStats | None
    uncovered_steps: int
    seconds: float


def all_cells(controller: ControllerMode = ControllerMode.OFF) -> Iterator[Cell]:
    """The whole matrix, 288 cells."""
    axes = (SsmRollbackMode, LADDERS, CONCURRENCY, BATCHES, (True, False))
    for mode, ladder, concurrency, batch, compaction in product(*axes):
        yield Cell(mode, ladder, concurrency, batch, compaction, controller)


def make_requests(count: int, seed: int = 0) -> list[GenerationRequest]:
    """Greedy and sampled requests, prompts that the model goes on with and prompts of noise.

    Some end at the context's end, some at an end id or a stop id inside a burst, some have
    penalties. The first sixteen are short and those from number 32 on are long, so that the latter
    are left alone on high slots.
    """
    text = load_text_model(model_folder())
    rng = random.Random(seed)
    chats = [(chat, tools) for chat, tools in tool_prompts(seed, count)]
    chats += [(chat, []) for chat in prose_prompts(seed, count)]
    rng.shuffle(chats)
    requests = []
    for i in range(count):
        if i % 5 == 4:
            ids = tuple(rng.randrange(20, 2000) for _ in range(rng.choice((1, 2, 63, 64, 65, 130))))
        else:
            ids = text.render_chat(chats[i][0], chats[i][1] or None, {}).token_ids
        ids = ids[: MAX_SEQ_LEN - 8]
        sampling = SamplingParams(
            max_tokens=min(rng.randrange(4, 12) if i < 16 else 40, MAX_SEQ_LEN - len(ids)),
            temperature=0.8 if i % 2 else 0.0,
            top_p=0.95 if i % 4 == 3 else 1.0,
            seed=1000 + i,
            ignore_eos=i % 3 == 0 or i >= 32,
            stop_token_ids=(198,) if i % 7 == 5 and i < 32 else (),
            frequency_penalty=0.5 if i % 6 == 2 else 0.0,
            min_tokens=3 if i % 4 == 1 else 0,
        )
        requests.append(GenerationRequest(i, ids, sampling))
    return requests


def model_folder() -> Path:
    """The packaged checkpoint."""
    return Path(str(files("spark_server") / "assets" / "spark-tiny"))


def make_core(cell: Cell | None, batch: int) -> EngineCore:
    """An engine for the cell, or one without speculation."""
    config = EngineConfig(
        str(model_folder()),
        max_batch_size=batch,
        max_seq_len=MAX_SEQ_LEN,
        # Forty prompts start in one step, so that they take forty slots.
        max_prefill_tokens=8192,
        memory_budget=4 << 30,
        threads=1,
        slot_compaction=cell is None or cell.compaction,
        speculation=None if cell is None else cell.policy(),
    )
    return build_engine(config, lambda phase, seconds, detail="": None).core


def run(core: EngineCore, requests: Sequence[GenerationRequest], concurrency: int) -> Outcome:
    """Closed loop of `concurrency` requests at a time.

    Raises:
        AssertionError: a request ended with an error, or the engine is not idle at the end.
    """
    waiting, live, uncovered = list(requests), 0, 0
    tokens: Tokens = {request.request_id: [] for request in requests}
    start = time.perf_counter()
    while waiting or live:
        while waiting and live < concurrency:
            core.add(waiting.pop(0))
            live += 1
        for delta in core.step():
            tokens[delta.request_id].extend(delta.token_ids)
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            live -= delta.finish_reason is not None
        stats = core.stats().speculation
        uncovered += stats is not None and stats.uncovered > 0
    core.scheduler.check()
    core.scheduler.check_idle()
    return Outcome(tokens, core.stats().speculation, uncovered, time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; the exit code is 1 when a cell gave other tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--controller", choices=[m.value for m in ControllerMode], default="off")
    parser.add_argument("--requests", type=int, default=48)
    asked = parser.parse_args(argv)
    requests = make_requests(asked.requests)
    want = run(make_core(None, 8), requests, 1).tokens
    wrong = cells = 0
    print(HEADER)
    for cell in all_cells(ControllerMode(asked.controller)):
        found = run(make_core(cell, cell.batch), requests, cell.concurrency)
        same = found.tokens == want
        cells += 1
        wrong += not same
        print(row(cell, found, same), flush=True)
    print(json.dumps({"bench": "spec_matrix", "cells": cells, "different": wrong}))
    return 1 if wrong else 0


def row(cell: Cell, found: Outcome, same: bool) -> str:
    """One line of the table."""
    stats = found.stats
    assert stats is not None
    partial = sum(stats.accepted_lengths[1:-1])
    slots = "moved" if cell.compaction else "pinned"
    return (
        f"{cell.mode.value:9} {cell.ladder:9} {cell.concurrency:7} {cell.batch:6}  {slots:8}"
        f" {stats.draft_tokens:7} {stats.accepted_tokens:8}"
        f" {stats.draft_tokens - stats.accepted_tokens:8} {partial:7} {found.uncovered_steps:9}"
        f" {found.seconds:5.1f}{'' if same else '  DIFFERENT'}"
    )


if __name__ == "__main__":
    sys.exit(main())
