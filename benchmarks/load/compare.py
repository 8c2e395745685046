"""Two servers in turn, with speculation and without: what it gains, and what the drafts came to."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console

from benchmarks.load.loop import Run, run_loop
from benchmarks.load.measure import Job
from benchmarks.load.processes import spawned_server
from benchmarks.load.prompts import PromptKind, PromptSource, Shape, fetch_text, first_model
from benchmarks.load.report import aligned, json_line
from benchmarks.load.wire import Target

HEAD = (
    "prompts", "clients", "off", "on", "on/off", "steps/token", "drafts", "accepted", "p1",
    "probes", "cut",
)  # fmt: skip
LEGEND = (
    "off, on: median tok/s; on/off: median over pairs of runs; steps/token: verifies per emitted "
    "token while drafting; drafts, accepted: per verify; p1: share of first drafts accepted; "
    "probes: of the controllers; cut: drafts by D-Cut"
)
# Steps that the controller needs at a width before it has settled, as tokens of each client.
LEARN_TOKENS = 96
_PREFIX = "spark_spec_decode_"

Counters = Mapping[str, float]


async def compare(args: argparse.Namespace, console: Console) -> int:
    """Measure both servers at every level and print the table; 1 if any request failed.

    Raises:
        OSError, WireError, ServerStartError: a server cannot be measured at all.
    """
    rows: list[dict[str, object]] = []
    flags = args.serve_flags
    async with (
        spawned_server(flags, args.api_key) as (off, off_pid),
        spawned_server([*flags, "--speculative"], args.api_key) as (on, on_pid),
    ):
        model = args.model or await first_model(off)
        for kind in (PromptKind.PROSE, PromptKind.TOOL):
            shape = Shape(
                kind,
                args.prompt_tokens,
                args.output_tokens,
                args.ignore_eos,
                args.temperature,
                model,
            )
            for level in args.concurrency:
                source = PromptSource(shape, None, args.seed + level)
                # Long enough that the beginning and the end, with fewer clients, weigh little.
                count = args.requests or max(8 * level, 32)
                for target in (off, on):
                    await _learn(target, shape, level, args)
                before = await counters(on)
                plain: list[Run] = []
                drafted: list[Run] = []
                for number in range(args.runs):
                    jobs = source.take(count)
                    turns = [(off, off_pid, plain), (on, on_pid, drafted)]
                    # Each goes first as often as second: what a turn leaves behind favours neither.
                    for target, pid, runs in turns if number % 2 == 0 else reversed(turns):
                        runs.append(await run_loop(target, jobs, level, pid, args.timeout))
                row = _row(kind, level, plain, drafted, before, await counters(on))
                rows.append(row)
                console.print(f"{kind.value}, {level} clients: {row['ratio']}", style="dim")
    print(aligned([HEAD, *(_cells(row) for row in rows)]))
    print(f"\n{LEGEND}")
    print(json_line({"bench": "speculation", "model": model, "runs": args.runs, "levels": rows}))
    return 1 if any(row["failed"] for row in rows) else 0


async def _learn(target: Target, shape: Shape, level: int, args: argparse.Namespace) -> None:
    """A round that is not measured: kernels are compiled and the controller has seen the width."""
    jobs = PromptSource(shape, None, args.seed + 7919 + level).take(max(level, 4))
    changes = {"max_tokens": LEARN_TOKENS, "ignore_eos": True}
    longer = [Job(job.path, {**job.body, **changes}) for job in jobs]
    await run_loop(target, longer, level, None, args.timeout)


async def counters(target: Target) -> dict[str, float]:
    """Sums of the speculation counters of /metrics, by name, and by position where there is one."""
    _, text = await fetch_text(target, "/metrics")
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(_PREFIX):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0].removeprefix(_PREFIX)
            found[name] = found.get(name, 0.0) + float(value)
            if 'position="0"' in series:
                found[f"{name}_first"] = float(value)
    return found


def paired_ratio(plain: Sequence[Run], drafted: Sequence[Run]) -> float | None:
    """Median of on / off of the runs of the same jobs, side by side in time.

    A machine shared with others has slow minutes: two medians may come from different ones.
    """
    pairs = zip(plain, drafted, strict=True)
    ratios = [on.tok_s / off.tok_s for off, on in pairs if off.tok_s]
    return round(statistics.median(ratios), 3) if ratios else None


def _row(
    kind: PromptKind,
    level: int,
    plain: list[Run],
    drafted: list[Run],
    before: Counters,
    after: Counters,
) -> dict[str, object]:
    def rose(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    off = statistics.median(run.tok_s for run in plain)
    on = statistics.median(run.tok_s for run in drafted)
    verifies = rose("num_drafts_total")
    accepted = rose("num_accepted_tokens_total")
    per = max(verifies, 1.0)
    return {
        "prompts": kind.value,
        "concurrency": level,
        "off": off,
        "on": on,
        "ratio": paired_ratio(plain, drafted),
        "steps_per_token": round(verifies / max(verifies + accepted, 1.0), 3),
        "drafts": round(rose("num_draft_tokens_total") / per, 2),
        "accepted": round(accepted / per, 2),
        "p1": round(rose("num_accepted_tokens_per_pos_total_first") / per, 3),
        "probes": round(rose("probes_total") + rose("reprobes_total")),
        "cut": round(rose("dcut_tokens_total")),
        "failed": sum(sum(run.errors.values()) for run in (*plain, *drafted)),
        "off_runs": [run.tok_s for run in plain],
        "on_runs": [run.tok_s for run in drafted],
    }


def _cells(row: Mapping[str, object]) -> tuple[str, ...]:
    keys = (
        "prompts", "concurrency", "off", "on", "ratio", "steps_per_token", "drafts", "accepted",
        "p1", "probes", "cut",
    )  # fmt: skip
    return tuple(f"{row[key]}" for key in keys)
