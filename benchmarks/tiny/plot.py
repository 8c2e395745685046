"""What a training run shows: a progress bar or log lines, and the loss curve as a PNG."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

from rich.progress import Progress as Bar
from rich.progress import TextColumn

from benchmarks.tiny import export

_EVERY_S = 30.0


class Reporter:
    """A bar on a terminal, else a line every half minute; averages losses between two lines."""

    def __init__(self, budget_s: float) -> None:
        self._bar = (
            Bar(*Bar.get_default_columns(), TextColumn("{task.fields[text]}"))
            if sys.stdout.isatty()
            else None
        )
        self._task = self._bar.add_task("training", total=budget_s, text="") if self._bar else None
        if self._bar:
            self._bar.start()
        self._sums: list[list[float]] = []
        self._since, self._tokens, self._cpu = time.monotonic(), 0, 0.0

    def step(
        self, step: int, tokens: int, cpu_s: float, loss: float, mtp: list[float], rate: float
    ) -> tuple[int, float, float] | None:
        """Note one step; returns (tokens, loss, first MTP loss) when a line was due."""
        if not self._sums and not self._tokens:
            self._tokens, self._cpu = tokens, cpu_s
        self._sums.append([loss, *mtp])
        if time.monotonic() - self._since < _EVERY_S:
            return None
        mean = [sum(column) / len(column) for column in zip(*self._sums, strict=True)]
        wall, speed = time.monotonic() - self._since, tokens - self._tokens
        text = (
            f"step {step} tokens {tokens / 1e6:.2f} M cpu {cpu_s / 60:.1f} min loss {mean[0]:.4f} "
            f"mtp {' '.join(f'{x:.3f}' for x in mean[1:])} lr {rate:.1e} "
            f"{speed / wall:.0f} tokens/s "
            f"({speed / max(cpu_s - self._cpu, 1e-9):.0f} a CPU second)"
        )
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=cpu_s, text=text)
        else:
            print(time.strftime("%H:%M:%S"), text, flush=True)
        self._sums, self._since, self._tokens, self._cpu = [], time.monotonic(), tokens, cpu_s
        return tokens, mean[0], mean[1]

    def close(self) -> None:
        """Stop the bar."""
        if self._bar:
            self._bar.stop()


def losses(history: list[tuple[int, float, float]], path: Path) -> None:
    """Training loss of trunk and MTP head over tokens; draws nothing before two points."""
    if len(history) < 2:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=90)
    axes = figure.add_subplot()
    x = [tokens / 1e6 for tokens, _, _ in history]
    axes.plot(x, [loss for _, loss, _ in history], label="next token (assistant and raw text)")
    axes.plot(x, [loss for _, _, loss in history], label="MTP, first draft, against the trunk")
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("cross-entropy, nats")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    export.replace(path, buffer.getvalue())
