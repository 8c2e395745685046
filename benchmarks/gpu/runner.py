"""Runs stages, each in a forked process with a time limit; some of them side by side.

A process of its own, because a fault in one kernel ends the CUDA context of whoever ran it, and
because a kernel that hangs can only be ended from outside. Knows no tensors.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Row, Status, error_row

Emit = Callable[[Row], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Stage:
    """A named part of the check.

    Attributes:
        name: for `--stages` and the table.
        seconds: it may take, start of its process included.
        run: emits its rows as it finds them; what it raises becomes a row.
        together: it measures no time, and may run beside its neighbours that measure none.
    """

    name: str
    seconds: float
    run: Callable[[Options, Emit], None]
    together: bool = False


def run_stages(
    stages: Sequence[Stage],
    options: Options,
    *,
    learn: Callable[[Options, Sequence[Row]], Options],
    workers: int = 1,
    clock: Clock = time.monotonic,
) -> Iterator[Row]:
    """All rows of all stages, `workers` at most at a time.

    `learn` gives the options for the stages after those whose rows it is given.
    """
    end = clock() + options.seconds
    for together, group in groupby(stages, key=lambda stage: stage.together):
        for part in [list(group)] if together else [[stage] for stage in group]:
            found: list[Row] = []
            for row in _run_group(part, options, end, workers, clock):
                found.append(row)
                yield row
            options = learn(options, found)


def _run_group(
    stages: Sequence[Stage], options: Options, end: float, workers: int, clock: Clock
) -> Iterator[Row]:
    """Rows of all stages as they come; the processes that are still there at the end are ended."""
    waiting = list(stages)
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                stage = waiting.pop(0)
                if clock() >= end:
                    text = f"no time left of {options.seconds:.0f} s"
                    yield Row(stage.name, stage.name, Status.ERROR, text)
                    continue
                started = _Running.start(stage, options, end, clock)
                running[started.receiver] = started
            if not running:
                continue
            soonest = min(one.deadline for one in running.values())
            wait(list(running), max(0.0, soonest - clock()))
            for one in list(running.values()):
                yield from one.news(clock)
                if one.over:
                    del running[one.receiver]
                    yield one.time(clock)
    finally:
        for one in running.values():
            one.stop()


@dataclass
class _Running:
    """A stage whose process has been started; `over` when nothing more comes of it."""

    stage: Stage
    process: BaseProcess
    receiver: Connection
    began: float
    deadline: float
    over: bool = False

    @classmethod
    def start(cls, stage: Stage, options: Options, end: float, clock: Clock) -> _Running:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_inside, args=(stage, options, sender), daemon=True)
        began = clock()
        process.start()
        sender.close()
        return cls(stage, process, receiver, began, min(began + stage.seconds, end))

    def news(self, clock: Clock) -> Iterator[Row]:
        """Rows that have come, and one more if the process failed or its time is up."""
        while not self.over and self.receiver.poll():
            try:
                row = self.receiver.recv()
            except EOFError:
                yield self._error("its process died without a word")
                row = None
            if row is None:
                self.over = True
                self.process.join(timeout=5.0)
                if self.process.exitcode:
                    yield self._error(f"exit code {self.process.exitcode}")
                self.stop()
            else:
                yield row
        if not self.over and clock() >= self.deadline:
            yield self._error(f"not done after {self.deadline - self.began:.0f} s, ended")
            self.over = True
            self.stop()

    def time(self, clock: Clock) -> Row:
        """What the stage took."""
        spent = clock() - self.began
        text = f"{spent:.1f} s of at most {self.stage.seconds:.0f} s"
        numbers = {"seconds": round(spent, 2)}
        return Row(self.stage.name, "time", Status.INFO, text, numbers, brief=False)

    def stop(self) -> None:
        """End the process if it is still there."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.receiver.close()

    def _error(self, text: str) -> Row:
        return Row(self.stage.name, self.stage.name, Status.ERROR, text)


def _inside(stage: Stage, options: Options, sender: Connection) -> None:
    """The forked process."""
    try:
        stage.run(options, sender.send)
    except Exception as error:
        traceback.print_exc()
        sender.send(error_row(stage.name, stage.name, error))
    sender.send(None)
    sender.close()
