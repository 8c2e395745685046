"""Command line of the check: which stages run, what is printed and written.

Imports no torch before the arguments are known: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.geometries import LARGE, SMALL
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import BAD, Row, counts, table
from kernels.environment import set_triton_defaults

if TYPE_CHECKING:
    from benchmarks.gpu.runner import Stage

REPORT = "gpu_check.json"
# Of the whole, so that a run ends within five minutes whatever hangs.
SECONDS = 290.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; the exit code is 1 when a row failed, 2 for wrong arguments."""
    options = parse(argv)
    if options.device == "cpu" and options.capability is None:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_triton_defaults()
    from benchmarks.gpu import stage_card
    from benchmarks.gpu.runner import run_stages

    stages = compile_stages(options) if options.capability else all_stages(options.smoke)
    known = [stage.name for stage in stages]
    unknown = sorted(set(options.stages) - set(known))
    if unknown:
        print(f"unknown stages {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if options.stages:
        stages = [stage for stage in stages if stage.name in options.stages]
    began = time.monotonic()
    rows: list[Row] = []
    workers = os.cpu_count() or 1
    for row in run_stages(stages, options, learn=stage_card.learn, workers=workers):
        rows.append(row)
        print(row.line(), flush=True)
    return finish(rows, options, time.monotonic() - began)


def finish(rows: Sequence[Row], options: Options, seconds: float) -> int:
    """Write the JSON file, print the short table and one line of JSON; gives the exit code."""
    found = counts(rows)
    summary = {
        "bench": "gpu_check",
        "device": options.device,
        "smoke": options.smoke,
        "seconds": round(seconds, 1),
        "rows": found,
        "passed": not any(row.status in BAD for row in rows) and bool(rows),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / REPORT
    text = json.dumps({**summary, "found": [row.as_dict() for row in rows]}, indent=1)
    report.write_text(text + "\n", encoding="utf-8")
    print("\n" + "\n".join(table(rows)))
    print(f"\n{seconds:.0f} s, {report}")
    print(json.dumps(summary))
    return 0 if summary["passed"] else 1


def all_stages(smoke: bool) -> list[Stage]:
    """Every stage in order, the most telling first; limits in seconds add up to more than a run."""
    from benchmarks.gpu import (
        stage_card,
        stage_engine,
        stage_invariant,
        stage_kernels,
        stage_mixers,
        stage_transformers,
    )
    from benchmarks.gpu.runner import Stage

    small, large = ("miniature-1", "miniature-3") if smoke else (SMALL, LARGE)
    names = stage_kernels.operators()
    return [
        Stage("card", 30, stage_card.run),
        # Compiling takes most of their time, and a core each.
        *(Stage(n, 90, partial(stage_kernels.check, n), together=True) for n in names),
        Stage(stage_transformers.STAGE, 90, partial(stage_transformers.run, small), together=True),
        Stage(stage_mixers.STAGE, 45, stage_mixers.run),
        Stage(large, 110, partial(stage_engine.run, large, True)),
        Stage(small, 50, partial(stage_engine.run, small, False)),
        Stage(stage_invariant.STAGE, 40, partial(stage_invariant.run, small)),
        *(Stage(f"{n}-speed", 30, partial(stage_kernels.measure, n)) for n in names),
    ]


def compile_stages(options: Options) -> list[Stage]:
    """Every kernel compiled for a card that is not here: the small cases, then those of a card."""
    from benchmarks.gpu import ahead, ahead_engine, stage_kernels
    from benchmarks.gpu.runner import Stage
    from engine.reserve.ssm_reserve import SsmRollbackMode
    from kernels.cases import CaseSize

    sizes = (CaseSize.SMOKE,) if options.smoke else (CaseSize.SMOKE, CaseSize.CARD)
    seconds = options.seconds
    operators = [
        Stage(f"{name}-{size.value}", seconds, partial(ahead.run, name, size), together=True)
        for size in sizes
        for name in stage_kernels.operators()
    ]
    # One after another: they hold gigabytes.
    engines = [
        Stage(
            f"engine-{name}-{ahead_engine.spelled(mode)}",
            seconds,
            partial(ahead_engine.run, name, mode),
        )
        for name in (() if options.smoke else (SMALL, LARGE))
        for mode in (None, *SsmRollbackMode)
    ]
    return [*operators, *engines]


def parse(argv: Sequence[str] | None) -> Options:
    """The options of a command line; $OUT is the default folder."""
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Proves and times the kernels and the engine on one card, in five minutes.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="small shapes and few steps")
    parser.add_argument("--stages", default="", help="names, with commas; all when empty")
    parser.add_argument("--kernels", default="", help="of the engine; triton on a card")
    parser.add_argument("--acceptance", type=float, default=0.8, help="chance of each draft")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the whole run")
    parser.add_argument(
        "--compile-for",
        type=int,
        metavar="CAPABILITY",
        help="only compile, without a card, for one of this compute capability: 90 for an H200",
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu_check_out"))
    asked = parser.parse_args(argv)
    if not 0 <= asked.acceptance <= 1:
        parser.error(f"--acceptance {asked.acceptance:g} is not within 0 and 1")
    if asked.compile_for is not None:
        asked.device = "cpu"
    elif asked.device == "cpu" and not asked.smoke:
        parser.error("--device cpu runs under Triton's interpreter, which takes --smoke")
    return Options(
        device=asked.device,
        smoke=asked.smoke,
        out=asked.out,
        seconds=asked.seconds,
        stages=tuple(name for name in asked.stages.split(",") if name),
        acceptance=asked.acceptance,
        capability=asked.compile_for,
        kernels=asked.kernels or ("triton" if asked.device == "cuda" else "naive"),
    )
