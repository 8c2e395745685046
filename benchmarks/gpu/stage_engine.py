"""Stage of one model: the decode ladder, plain and in every rollback mode, against the floor.

The floor is that of `benchmarks.traffic` at the measured bandwidth; goals are set for the 27B.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.gpu.engines import (
    Steps,
    built,
    engine_config,
    forced_core,
    free,
    model_of,
    speculation,
    timed_steps,
)
from benchmarks.gpu.options import Machine, Options
from benchmarks.gpu.rows import Row, Status, error_row, goal, verdict
from benchmarks.gpu.runner import Emit
from benchmarks.traffic import StepShape, draft_work, floor_seconds, step_work
from engine.build import BuiltEngine
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.row_budget import split_verify
from engine.weights.model_config import ModelConfig
from kernels.compiles import CompileCounter

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFTS = 3
LENGTH = 256
# 128 full-width snapshot slots of the 27B would take 95.6 GiB beside its weights.
SNAPSHOT_WIDTH = 32
GOAL_WIDTHS = (1, 32)
GOAL_FLOORS = 1.35


@dataclass(frozen=True, slots=True)
class _Ladder:
    """One engine: a rollback mode, or None for no drafts, over some widths."""

    mode: SsmRollbackMode | None
    widths: tuple[int, ...]

    @property
    def name(self) -> str:
        return "plain" if self.mode is None else self.mode.value


def run(name: str, goals: bool, options: Options, emit: Emit) -> None:
    """Emit a row per mode and width; with `goals` the plain step is held to its floor."""
    widths = (1, 2) if options.smoke else WIDTHS
    plain: dict[int, float] = {}
    for ladder in _ladders(widths):
        # Also what an exception in the ladder before still held on to.
        free(options.device)
        try:
            rows: list[Row] = []
            for found in _measured(name, ladder, options):
                if isinstance(found, Row):
                    emit(found)
                    continue
                width, steps = found
                if ladder.mode is None:
                    plain[width] = steps.seconds
                rows.append(_row(name, ladder, width, steps, options, plain, goals))
                emit(rows[-1])
            emit(_summary(name, ladder, rows))
        except Exception as error:
            emit(error_row(name, ladder.name, error))


def _ladders(widths: tuple[int, ...]) -> Iterator[_Ladder]:
    yield _Ladder(None, widths)
    for mode in (SsmRollbackMode.CARRY, SsmRollbackMode.REPLAY, SsmRollbackMode.SNAPSHOT):
        narrow = mode is SsmRollbackMode.SNAPSHOT
        yield _Ladder(mode, tuple(w for w in widths if not narrow or w <= SNAPSHOT_WIDTH))


def _measured(name: str, ladder: _Ladder, options: Options) -> Iterator[tuple[int, Steps] | Row]:
    """Steps of every width, between what the engine is made of and how ready it was."""
    widest, began = max(ladder.widths), time.perf_counter()
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    config = engine_config(options, widest, LENGTH, dtype)
    if ladder.mode is not None:
        config = replace(config, speculation=speculation(ladder.mode, widest, DRAFTS))
    with built(name, config) as engine:
        core = engine.core
        if ladder.mode is not None:
            core = forced_core(engine, config, options.acceptance)
        yield _made_of(name, ladder, engine, time.perf_counter() - began)
        late = CompileCounter()
        for width in ladder.widths:
            yield width, timed_steps(core, width, 3 if options.smoke else 16)
        count = late.count()
        text = f"{count} kernels compiled after warm-up (goal 0)"
        yield Row(name, f"{ladder.name} compiles", verdict(not count), text, {"compiles": count})


def _made_of(name: str, ladder: _Ladder, engine: BuiltEngine, seconds: float) -> Row:
    graphs = engine.model.graphs is not None
    text = f"operators {engine.info.kernels}, {'with' if graphs else 'no'} CUDA graphs, "
    return Row(
        name,
        f"{ladder.name} build",
        Status.INFO,
        f"{text}built in {seconds:.1f} s",
        {"kernels": engine.info.kernels, "graphs": graphs, "seconds": seconds},
        brief=False,
    )


def _row(
    name: str,
    ladder: _Ladder,
    width: int,
    steps: Steps,
    options: Options,
    plain: dict[int, float],
    goals: bool,
) -> Row:
    model = model_of(name)
    numbers: dict[str, int | float | str | bool | None] = {
        "width": width,
        "mode": ladder.name,
        "milliseconds": steps.seconds * 1e3,
        "tokens_per_second": steps.tokens / steps.count / steps.seconds,
        "accepted": steps.accepted,
        "drafted": steps.drafted,
        "state_bytes_per_step": steps.state_bytes,
        "host_waits": steps.waits,
    }
    text = f"{steps.seconds * 1e3:.2f} ms, {numbers['tokens_per_second']:,.0f} tok/s"
    status, held = Status.INFO, False
    if ladder.mode is not None:
        status = verdict(steps.drafted > 0)
        if width in plain:
            numbers["cost"] = steps.seconds / plain[width]
            text += f", {numbers['cost']:.2f} x plain"
        text += f", {steps.accepted} of {steps.drafted} drafts"
        numbers["forwards"] = len(split_verify([1 + DRAFTS] * width))
    if options.machine is not None:
        floor = _floor(model, ladder, width, steps, options.machine)
        numbers |= {"floor_milliseconds": floor * 1e3, "floors": steps.seconds / floor}
        text += f", {steps.seconds / floor:.2f} x floor"
        if goals and ladder.mode is None and width in GOAL_WIDTHS:
            held = True
            status = goal(steps.seconds <= GOAL_FLOORS * floor, smoke=options.smoke)
            text += f" (goal {GOAL_FLOORS})"
    return Row(name, f"{ladder.name} {width}", status, text, numbers, brief=held)


def _summary(name: str, ladder: _Ladder, rows: list[Row]) -> Row:
    """All widths of a ladder on one line: milliseconds, and their ratios to the floor."""
    columns = ("milliseconds", "floors", "cost")
    values = {
        column: [value for row in rows if isinstance(value := row.numbers.get(column), float)]
        for column in columns
    }
    text = "ms " + " ".join(f"{ms:.1f}" for ms in values["milliseconds"])
    for column, what in (("floors", "x floor"), ("cost", "x plain")):
        if values[column]:
            text += f"; {what} " + " ".join(f"{ratio:.2f}" for ratio in values[column])
    widths = " ".join(str(width) for width in ladder.widths)
    waits = [row.numbers["host_waits"] for row in rows]
    text += f"; host waits {waits[0]} to {waits[-1]}" if any(waits) else ""
    return Row(name, f"{ladder.name}, widths {widths}", Status.INFO, text)


def _floor(
    model: ModelConfig, ladder: _Ladder, width: int, steps: Steps, machine: Machine
) -> float:
    """Seconds that the measured limits allow for such a step, drafting included."""
    if ladder.mode is None:
        shape = StepShape(width, 1, steps.context)
        return floor_seconds(step_work(model, shape), machine.bandwidth, machine.rate)
    per_sequence = steps.tokens / steps.count / width
    shape = StepShape(
        width,
        1 + DRAFTS,
        steps.context,
        ladder.mode,
        emitted=min(1 + DRAFTS, max(1, math.floor(per_sequence + 0.5))),
    )
    work = (*step_work(model, shape), *draft_work(model, shape))
    return floor_seconds(work, machine.bandwidth, machine.rate)
