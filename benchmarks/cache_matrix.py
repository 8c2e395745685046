"""The prefix cache against no prefix cache, cell by cell: same tokens, same bits of probability.

Every cell is an engine of its own over the packaged model; knows no HTTP. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from benchmarks.spec_matrix import model_folder
from benchmarks.tiny.corpus import prose_prompts
from engine.build import build_engine
from engine.config import GRID, EngineConfig
from engine.core import EngineCore
from engine.request import FinishReason, GenerationRequest, PrefixCacheStats, SamplingParams
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from kernels.ops import Ops, cpu_ops
from spark_server.text.model import load_text_model

MAX_SEQ_LEN = 576
PLACES = 16
HEADER = (
    "cache speculation workload  pressure  requests  hits  reused%  evicted  reclaimed  preempted"
    "  tokens  bits      s"
)
Prompt = tuple[int, ...]
# (token, its log-probability) of every token of an answer.
Answer = list[tuple[int, float]]


class Pressure(StrEnum):
    """What the cache has room for.

    NONE: everything. TIGHT: three states, and blocks for little more than one long sequence, four
    at a time. RANDOM: everything, and between steps something is thrown away at random.
    """

    NONE = "none"
    TIGHT = "tight"
    RANDOM = "random"


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix; `speculation` None plain-decodes."""

    cached: bool
    speculation: SsmRollbackMode | None
    workload: str
    pressure: Pressure = Pressure.NONE
    exact: bool = True


@dataclass(frozen=True)
class Work:
    """Requests in waves: a wave begins when the one before it has ended."""

    waves: tuple[tuple[GenerationRequest, ...], ...]

    @property
    def requests(self) -> list[GenerationRequest]:
        """All of them in order."""
        return [request for wave in self.waves for request in wave]


@dataclass(frozen=True)
class Outcome:
    """What a cell gave; `cached` is how much of each request's prompt was reused."""

    answers: dict[int, Answer]
    cached: dict[int, int]
    stats: PrefixCacheStats
    preemptions: int
    seconds: float


@dataclass(frozen=True)
class Differences:
    """Requests whose tokens, or whose bits, are not the reference's, and where that begins."""

    tokens: list[int]
    bits: list[int]


def make_core(cell: Cell | None, ops: Ops | None = None) -> EngineCore:
    """An engine for the cell, or the reference: no cache, no speculation."""
    policy = None
    if cell is not None and cell.speculation is not None:
        policy = PolicySettings(
            num_drafts=3, rollback=cell.speculation, controller=ControllerMode.OFF
        )
    tight = cell is not None and cell.pressure is Pressure.TIGHT
    cached = cell is not None and cell.cached
    config = EngineConfig(
        str(model_folder()),
        max_batch_size=8,
        max_seq_len=MAX_SEQ_LEN,
        max_prefill_tokens=256,
        memory_budget=4 << 30,
        kv_tokens=MAX_SEQ_LEN + 2 * GRID if tight else None,
        threads=1,
        speculation=policy,
        prefix_caching=cached,
        snapshot_slots=(3 if tight else PLACES) if cached else 0,
        prefix_cache_exact=cell is None or cell.exact,
    )
    return build_engine(config, lambda phase, seconds, detail="": None, ops=ops).core


def run(core: EngineCore, work: Work, cell: Cell | None, seed: int = 0) -> Outcome:
    """All waves; four requests at a time under pressure, else one.

    Raises:
        AssertionError: a request ended with an error, or an account is wrong.
    """
    pressure = Pressure.NONE if cell is None else cell.pressure
    rng = random.Random(seed)
    answers: dict[int, Answer] = {request.request_id: [] for request in work.requests}
    cached: dict[int, int] = {}
    start = time.perf_counter()
    for wave in work.waves:
        waiting, live = list(wave), 0
        while waiting or live:
            while waiting and live < (4 if pressure is Pressure.TIGHT else 1):
                core.add(waiting.pop(0))
                live += 1
            for delta in core.step():
                assert delta.finish_reason is not FinishReason.ERROR, delta.error
                chances = [entry.logprob for entry in delta.logprobs]
                answers[delta.request_id] += zip(delta.token_ids, chances, strict=True)
                if delta.stats is not None:
                    cached[delta.request_id] = delta.stats.cached_tokens
                    live -= 1
            if pressure is Pressure.RANDOM and rng.random() < 0.01:
                throw_away(core, rng)
        core.scheduler.check()
        core.scheduler.check_idle()
    stats = core.stats()
    return Outcome(
        answers,
        cached,
        stats.prefix_cache or PrefixCacheStats(),
        stats.preemptions,
        time.perf_counter() - start,
    )


def throw_away(core: EngineCore, rng: random.Random) -> None:
    """Give up some idle blocks and one state, as others would make the cache do."""
    cache = core.scheduler.holdings.cache
    assert cache is not None
    cache.reclaim(rng.randrange(8))
    if rng.random() < 0.5:
        cache.checkpoints.drop_oldest()


def compare(found: dict[int, Answer], want: dict[int, Answer]) -> Differences:
    """Where answers part from the reference; by request the first position."""
    tokens, bits = [], []
    for request_id, answer in found.items():
        pairs = list(zip(answer, want[request_id], strict=True))
        parted = next((i for i, (got, right) in enumerate(pairs) if got[0] != right[0]), None)
        if parted is not None:
            tokens.append(parted)
        blurred = next((i for i, (got, right) in enumerate(pairs) if got != right), None)
        if blurred is not None:
            bits.append(blurred)
    return Differences(tokens, bits)


class Workloads:
    """Requests with prompts of the packaged model's own kind."""

    def __init__(self, seed: int = 0, *, lengths: Sequence[int] = range(1, 201)) -> None:
        self._rng = random.Random(seed)
        text = load_text_model(model_folder())
        chats = prose_prompts(seed, 60)
        rendered = [text.render_chat(chat, None, {}).token_ids for chat in chats]
        self._texts = [tuple(t for ids in rendered[i::6] for t in ids) for i in range(6)]
        self._lengths = lengths
        self._next_id = 0

    def request(self, prompt: Sequence[int], max_tokens: int = 6) -> GenerationRequest:
        """One request; every other one draws its tokens at random."""
        self._next_id += 1
        n = self._next_id
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.8 if n % 2 else 0.0,
            seed=n,
            ignore_eos=True,
            logprobs=0,
        )
        return GenerationRequest(n, tuple(prompt), params)

    def by_length(self) -> Work:
        """Prompts of every length, each asked for twice, of three texts."""
        waves = []
        for length in self._lengths:
            prompt = self._texts[length % 3][:length]
            waves += [(self.request(prompt),), (self.request(prompt),)]
        return Work(tuple(waves))

    def shared(self) -> Work:
        """Long beginnings with ends of their own, all at once and then again."""
        starts = [self._texts[i][: 130 + 97 * i] for i in range(3)]
        waves = []
        for repeat in range(2):
            wave = []
            for number, start in product(range(6), starts):
                tail = self._texts[3 + number % 3][repeat : repeat + 1 + 13 * number]
                wave.append(self.request((*start, *tail), 12))
            waves.append(tuple(wave))
        return Work(tuple(waves))

    def branches(self) -> Work:
        """Prompts that part on the grid, and just before and behind it."""
        waves = []
        for stem in (63, 64, 65, 127, 128, 129, 191, 192, 193):
            start = self._texts[stem % 3][:stem]
            for number in range(4):
                tail = self._texts[3 + number % 3][number : number + 70 + 40 * number]
                waves.append((self.request((*start, *tail)),))
        return Work(tuple(waves))

    def chats(self, reference: EngineCore, chats: int = 6) -> Work:
        """Three turns each; the answers that later turns contain are the reference's."""
        texts: list[Prompt] = [self._texts[i % 6][i : i + 40 + 23 * i] for i in range(chats)]
        waves = []
        for turn in range(3):
            wave = tuple(self.request(text, 70) for text in texts)
            waves.append(wave)
            found = run(reference, Work((wave,)), None).answers
            for number, request in enumerate(wave):
                answer = tuple(token for token, _ in found[request.request_id])
                more = self._texts[(number + turn) % 6][50 : 55 + 9 * turn]
                texts[number] = (*texts[number], *answer, *more)
        return Work(tuple(waves))

    def all(self, reference: EngineCore, only: str | None = None) -> dict[str, Work]:
        """Every workload by name, or one of them; the reference answers the turns of chats."""
        made: dict[str, Callable[[], Work]] = {
            "lengths": self.by_length,
            "shared": self.shared,
            "branches": self.branches,
            "chats": lambda: self.chats(reference),
        }
        return {name: make() for name, make in made.items() if only in (None, name)}

    def small(self, reference: EngineCore) -> dict[str, Work]:
        """Fewer of each, for tests."""
        shared, branches = self.shared(), self.branches()
        return {
            "lengths": self.by_length(),
            "shared": Work(tuple(wave[:5] for wave in shared.waves)),
            "branches": Work(branches.waves[::3]),
            "chats": self.chats(reference, 2),
        }


MODES = (None, SsmRollbackMode.CARRY, SsmRollbackMode.SNAPSHOT)


def all_cells(
    names: Sequence[str], modes: Sequence[SsmRollbackMode | None] = MODES, *, exact: bool = True
) -> Iterator[Cell]:
    """Speculation by workload without the cache, and with it by pressure too: 48 cells."""
    for mode, name in product(modes, names):
        yield Cell(False, mode, name)
    for mode, name, pressure in product(modes, names, Pressure):
        yield Cell(True, mode, name, pressure, exact)


def chunked_ops() -> Ops:
    """The CPU's operators with prompts in the chunked form, as on a GPU: two forms that differ."""
    from kernels.gdn.naive import gdn_mixer

    return replace(cpu_ops(), name="chunked", gdn_mixer=gdn_mixer, one_form=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; the exit code is 1 when a cell that promises equality broke it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-prefix-cache-exact", action="store_true", help="reuse answers too")
    parser.add_argument("--chunked", action="store_true", help="prompts in the chunked GDN form")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the 200 lengths")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="the shortest length")
    parser.add_argument("--only", metavar="WORKLOAD", help="lengths, shared, branches or chats")
    parser.add_argument("--speculation", choices=("off", "carry", "replay", "snapshot"))
    asked = parser.parse_args(argv)
    modes: Sequence[SsmRollbackMode | None] = MODES
    if asked.speculation:
        modes = (None if asked.speculation == "off" else SsmRollbackMode(asked.speculation),)
    ops = chunked_ops() if asked.chunked else None
    reference = make_core(None, ops)
    works = Workloads(lengths=range(asked.first, 201, asked.every)).all(reference, asked.only)
    want = {name: run(reference, work, None).answers for name, work in works.items()}
    print(HEADER)
    cells = wrong = requests = 0
    hits: Counter[str] = Counter()
    parted: list[int] = []
    blurred: list[int] = []
    for cell in all_cells(list(works), modes, exact=not asked.no_prefix_cache_exact):
        found = run(make_core(cell, ops), works[cell.workload], cell)
        differences = compare(found.answers, want[cell.workload])
        print(row(cell, found, differences), flush=True)
        cells += 1
        wrong += bool(differences.tokens or differences.bits)
        requests += len(found.answers)
        hits["hits"] += found.stats.hits
        parted += differences.tokens
        blurred += differences.bits
    summary = {"bench": "cache_matrix", "cells": cells, "requests": requests, **hits}
    summary |= {"different_cells": wrong}
    for name, first in (("tokens", parted), ("bits", blurred)):
        summary[f"answers_with_other_{name}"] = len(first)
        if first:
            summary[f"first_other_{name}_median"] = sorted(first)[len(first) // 2]
    print(json.dumps(summary))
    promised = not (asked.no_prefix_cache_exact and asked.chunked)
    return 1 if wrong and promised else 0


def row(cell: Cell, found: Outcome, differences: Differences) -> str:
    """One line of the table."""
    stats = found.stats
    reused = 100 * stats.hit_tokens / max(stats.queried_tokens, 1)
    mode = cell.speculation.value if cell.speculation is not None else "off"
    return (
        f"{'on' if cell.cached else 'off':5} {mode:11} {cell.workload:9} {cell.pressure.value:8}"
        f" {len(found.answers):9} {stats.hits:5} {reused:8.1f} {stats.checkpoints_evicted:8}"
        f" {stats.blocks_evicted:10} {found.preemptions:10} {len(differences.tokens):7}"
        f" {len(differences.bits):5} {found.seconds:6.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
