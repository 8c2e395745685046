"""Runs stages one after another, each in a forked process with a time limit. Knows no tensors.

A process of its own, because a fault in one kernel ends the CUDA context of whoever ran it, and
because a kernel that hangs can only be ended from outside.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Row, Status, error_row

Emit = Callable[[Row], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """A named part of the check.

    Attributes:
        name: for `--stages` and the table.
        seconds: it may take, start of its process included.
        run: emits its rows as it finds them; what it raises becomes a row.
    """

    name: str
    seconds: float
    run: Callable[[Options, Emit], None]


def run_stage(stage: Stage, options: Options, seconds: float) -> Iterator[Row]:
    """The rows of one stage as they come, and one more if it failed or ran out of `seconds`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_inside, args=(stage, options, sender), daemon=True)
    deadline = time.monotonic() + seconds
    process.start()
    sender.close()
    try:
        yield from _received(receiver, stage, deadline, seconds)
    finally:
        process.join(timeout=0.0 if time.monotonic() >= deadline else 5.0)
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
    if process.exitcode and process.exitcode > 0:
        yield Row(stage.name, stage.name, Status.ERROR, f"exit code {process.exitcode}")


def run_stages(
    stages: Sequence[Stage],
    options: Options,
    *,
    learn: Callable[[Options, Sequence[Row]], Options],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """All rows of all stages; `learn` gives the options for the stages after each one."""
    end = clock() + options.seconds
    for stage in stages:
        began = clock()
        if began >= end:
            text = f"no time left of {options.seconds:.0f} s"
            yield Row(stage.name, stage.name, Status.ERROR, text)
            continue
        found: list[Row] = []
        for row in run_stage(stage, options, min(stage.seconds, end - began)):
            found.append(row)
            yield row
        options = learn(options, found)
        spent = clock() - began
        yield Row(
            stage.name,
            "time",
            Status.INFO,
            f"{spent:.1f} s of at most {stage.seconds:.0f} s",
            {"seconds": round(spent, 2)},
            brief=False,
        )


def _received(receiver: Connection, stage: Stage, deadline: float, seconds: float) -> Iterator[Row]:
    """Rows until the other end says None, dies, or the time is up."""
    while True:
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            text = f"not done after {seconds:.0f} s, ended"
            yield Row(stage.name, stage.name, Status.ERROR, text)
            return
        try:
            row = receiver.recv()
        except EOFError:
            yield Row(stage.name, stage.name, Status.ERROR, "its process died without a word")
            return
        if row is None:
            return
        yield row


def _inside(stage: Stage, options: Options, sender: Connection) -> None:
    """The forked process."""
    try:
        stage.run(options, sender.send)
    except Exception as error:
        traceback.print_exc()
        sender.send(error_row(stage.name, stage.name, error))
    sender.send(None)
    sender.close()
