"""Prints, as Markdown, what a decode and a verify step of a model move and compute on paper.

Run `python -m benchmarks.paper configs/geometries/qwen3.6-27b.json`; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.traffic import (
    StepShape,
    Work,
    draft_work,
    floor_seconds,
    forced_bytes,
    state_bytes,
    step_work,
    total_flops,
)
from engine.errors import ModelFormatError
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.weights.model_config import ModelConfig, parse_config

BATCHES = (1, 32, 128)
BANDWIDTHS = (("4.3 TB/s", 4.3e12), ("273 GB/s", 273e9))


@dataclass(frozen=True)
class Paper:
    """What the tables are made for: rows of a verify, context of every sequence."""

    model: ModelConfig
    rows: int
    context: int

    def work(self, sequences: int, rows: int) -> tuple[Work, ...]:
        """A step in carry mode with every draft accepted."""
        return step_work(self.model, StepShape(sequences, rows, self.context, emitted=rows))

    def drafting(self, sequences: int) -> tuple[Work, ...]:
        """The drafter's passes for the next verify, after one with every draft accepted."""
        shape = StepShape(sequences, self.rows, self.context, emitted=self.rows)
        return draft_work(self.model, shape)


def operator_table(paper: Paper, rows: int) -> Iterator[str]:
    """Megabytes and GFLOP by operator, a column per batch."""
    per_batch = [paper.work(batch, rows) for batch in BATCHES]
    yield (
        "| operator | "
        + " | ".join(f"MB, {b}" for b in BATCHES)
        + " | "
        + " | ".join(f"GFLOP, {b}" for b in BATCHES)
        + " |"
    )
    yield "|---" * (1 + 2 * len(BATCHES)) + "|"
    for items in zip(*per_batch, strict=True):
        yield _operator_row(items[0].operator, [i.bytes for i in items], [i.flops for i in items])
    yield _operator_row(
        "all but activations",
        [forced_bytes(work) for work in per_batch],
        [total_flops(work) for work in per_batch],
    )


def floor_table(paper: Paper) -> Iterator[str]:
    """Milliseconds at each bandwidth: a plain step, a verify, and a verify with its drafting."""
    names = [name for name, _ in BANDWIDTHS]
    yield (
        "| step | sequences | GB | FLOP per byte | "
        + " | ".join(f"ms at {name}" for name in names)
        + " |"
    )
    yield "|---" * (4 + len(names)) + "|"
    for batch in BATCHES:
        verify = paper.work(batch, paper.rows)
        for what, work in (
            ("decode", paper.work(batch, 1)),
            (f"verify, K = {paper.rows}", verify),
            (f"verify and {paper.rows - 1} drafts", (*verify, *paper.drafting(batch))),
        ):
            moved = forced_bytes(work)
            times = " | ".join(f"{floor_seconds(work, b) * 1e3:.2f}" for _, b in BANDWIDTHS)
            intensity = total_flops(work) / moved
            yield f"| {what} | {batch} | {moved / 1e9:.2f} | {intensity:.1f} | {times} |"


def rollback_table(paper: Paper) -> Iterator[str]:
    """Megabytes of recurrent state per sequence and step, by mode and tokens emitted."""
    counts = range(1, paper.rows + 1)
    yield (
        f"| MB per sequence, K = {paper.rows} | "
        + " | ".join(f"{n} emitted" for n in counts)
        + " | 32 sequences, 1 emitted, ms at 4.3 TB/s |"
    )
    yield "|---" * (2 + paper.rows) + "|"
    plain = state_bytes(paper.model, StepShape(1))
    yield _state_row("plain step (K = 1)", [plain] + [None] * (paper.rows - 1))
    for mode in SsmRollbackMode:
        moved = [
            state_bytes(paper.model, StepShape(1, paper.rows, paper.context, mode, n))
            for n in counts
        ]
        yield _state_row(mode.value, [*moved])


def pages(paper: Paper) -> Iterator[str]:
    """The whole text, line by line."""
    yield f"One decode step; sequences of {paper.context} tokens:"
    yield ""
    yield from operator_table(paper, 1)
    yield ""
    yield f"One verify step of K = {paper.rows} rows each, carry mode, every draft accepted:"
    yield ""
    yield from operator_table(paper, paper.rows)
    yield ""
    yield from floor_table(paper)
    yield ""
    yield from rollback_table(paper)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a config.json; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("config", type=Path, help="config.json of a model")
    parser.add_argument("--drafts", type=int, default=3, choices=range(1, 9), metavar="1..8")
    parser.add_argument("--context", type=int, default=1024, help="tokens of every sequence")
    asked = parser.parse_args(argv)
    try:
        model = parse_config(json.loads(asked.config.read_text(encoding="utf-8")))
    except (OSError, ValueError, ModelFormatError) as error:
        parser.error(f"{asked.config} cannot be used: {error}")
    paper = Paper(model, asked.drafts + 1, asked.context)
    for line in pages(paper):
        print(line)
    print(json.dumps({"bench": "paper", "model": asked.config.stem, **_summary(paper)}))
    return 0


def _summary(paper: Paper) -> dict[str, int]:
    return {f"decode_bytes_{b}": forced_bytes(paper.work(b, 1)) for b in BATCHES}


def _operator_row(name: str, moved: Sequence[int], flops: Sequence[int]) -> str:
    cells = [f"{n / 1e6:,.1f}" for n in moved] + [f"{n / 1e9:,.1f}" for n in flops]
    return f"| {name} | " + " | ".join(cells) + " |"


def _state_row(name: str, moved: Sequence[int | None]) -> str:
    cells = ["" if n is None else f"{n / 1e6:,.1f}" for n in moved]
    first = moved[0] or 0
    return f"| {name} | " + " | ".join(cells) + f" | {32 * first / 4.3e12 * 1e3:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
