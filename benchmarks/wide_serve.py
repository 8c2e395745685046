"""One client, many, one again: a wide server that speculates, as its own metrics tell it.

Starts a server, changes the number of clients, scrapes /metrics meanwhile, prints what changed, and
draws the dashboard's speculation panels from what was scraped. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.loop import run_loop
from benchmarks.load.processes import spawned_server
from benchmarks.load.prompts import PromptKind, PromptSource, Shape, fetch_text, first_model
from benchmarks.load.wire import Target

LEVELS = (1, 16, 128, 8, 1)
PERIOD = 0.25
Labels = tuple[str, ...]


@dataclass
class Scrapes:
    """Every sample of /metrics by name and label values, one number per scrape."""

    seconds: list[float] = field(default_factory=list)
    samples: list[dict[tuple[str, Labels], float]] = field(default_factory=list)

    def add(self, now: float, text: str) -> None:
        """Take over one page of metrics."""
        found: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name, tuple(sample.labels.values())] = sample.value
        self.seconds.append(now)
        self.samples.append(found)

    def labels(self, name: str) -> list[Labels]:
        """Label values that a metric was ever seen with."""
        return sorted({labels for page in self.samples for own, labels in page if own == name})

    def gauge(self, name: str, labels: Labels = ()) -> list[float]:
        """Its value at every scrape, 0 where it was absent."""
        return [page.get((name, labels), 0.0) for page in self.samples]

    def rate(self, name: str, labels: Labels = (), over: int = 4) -> list[float]:
        """Its growth over the last `over` scrapes."""
        values = self.gauge(name, labels)
        return [value - values[max(0, i - over)] for i, value in enumerate(values)]


def share(part: Sequence[float], whole: Sequence[float]) -> list[float]:
    """part / whole, NaN where there is nothing to divide by."""
    return [p / w if w else float("nan") for p, w in zip(part, whole, strict=True)]


async def serve_widely(flags: Sequence[str], tokens: int) -> Scrapes:
    """Run the levels against a server of its own."""
    scrapes = Scrapes()
    async with spawned_server([*flags, "--speculative"], None) as (target, pid):
        shape = Shape(PromptKind.PROSE, 64, tokens, True, 0.0, await first_model(target))
        source = PromptSource(shape, None, 5)
        watching = asyncio.create_task(_watch(target, scrapes))
        try:
            for level in LEVELS:
                run = await run_loop(target, source.take(max(4, 3 * level)), level, pid, 300.0)
                print(f"{level:>4} clients: {run.tok_s:.0f} tok/s, errors {run.errors or 'none'}")
        finally:
            watching.cancel()
    return scrapes


async def _watch(target: Target, scrapes: Scrapes) -> None:
    began = time.perf_counter()
    while True:
        _, text = await fetch_text(target, "/metrics")
        scrapes.add(time.perf_counter() - began, text)
        await asyncio.sleep(PERIOD)


def changes(scrapes: Scrapes) -> list[dict[str, float]]:
    """Scrapes at which speculation engaged or disengaged, with who ran then."""
    engaged = scrapes.gauge("spark_spec_decode_engaged")
    running = scrapes.gauge("spark_requests_running")
    found = []
    for i, now in enumerate(engaged):
        if i and now != engaged[i - 1] and running[i]:
            slots = {
                labels[0]: scrapes.gauge("spark_spec_decode_active_slots", labels)[i]
                for labels in scrapes.labels("spark_spec_decode_active_slots")
            }
            found.append(
                {"s": round(scrapes.seconds[i], 2), "engaged": now, "running": running[i], **slots}
            )
    return found


def draw(scrapes: Scrapes, path: Path) -> None:
    """The speculation panels of the dashboard as one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 2, figsize=(13, 10), sharex=True, layout="constrained")
    time_axis = scrapes.seconds

    def panel(place: tuple[int, int], title: str, lines: dict[str, list[float]]) -> None:
        axis = axes[place]
        for name, values in lines.items():
            axis.plot(time_axis, values, label=name, linewidth=1.4)
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if lines:
            axis.legend(fontsize=8, loc="upper right")

    prefix = "spark_spec_decode_"
    slots = prefix + "active_slots"
    panel(
        (0, 0),
        "Sequences: running, in covered and in uncovered slots",
        {"running": scrapes.gauge("spark_requests_running")}
        | {
            f"covered: {labels[0]}": scrapes.gauge(slots, labels)
            for labels in scrapes.labels(slots)
        },
    )
    panel((0, 1), "Engaged (1) or not (0)", {"engaged": scrapes.gauge(prefix + "engaged")})
    positions = prefix + "num_accepted_tokens_per_pos_total"
    verifies = scrapes.rate(prefix + "num_drafts_total")
    panel(
        (1, 0),
        "Accepted per verify, by position, over a second",
        {
            f"position {labels[0]}": share(scrapes.rate(positions, labels), verifies)
            for labels in scrapes.labels(positions)
        },
    )
    accepted = scrapes.rate(prefix + "num_accepted_tokens_total")
    drafted = scrapes.rate(prefix + "num_draft_tokens_total")
    panel((1, 1), "Accept rate, over a second", {"accepted / drafted": share(accepted, drafted)})
    reasons = prefix + "plain_steps_total"
    panel(
        (2, 0),
        "Steps that did not speculate, by reason, over a second",
        {
            labels[0]: scrapes.rate(reasons, labels)
            for labels in scrapes.labels(reasons)
            if any(scrapes.gauge(reasons, labels))
        },
    )
    panel(
        (2, 1),
        "Tokens, over a second",
        {"tokens": scrapes.rate("spark_engine_generation_tokens_total")},
    )
    for axis in axes[2]:
        axis.set_xlabel("seconds")
    levels = " → ".join(map(str, LEVELS))
    figure.suptitle(f"Clients {levels}, scraped every {PERIOD:g} s")
    figure.savefig(path, dpi=65)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m benchmarks.wide_serve`."""
    parser = argparse.ArgumentParser(prog="wide_serve", description=__doc__)
    parser.add_argument("--picture", type=Path, help="draw the panels into this PNG")
    parser.add_argument("--output-tokens", type=int, default=96, help="of a request (default 96)")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args(argv)
    flags = args.flags or ["--max-batch-size", "128"]
    scrapes = asyncio.run(serve_widely(flags, args.output_tokens))
    found = changes(scrapes)
    for change in found:
        print(", ".join(f"{name} {value:g}" for name, value in change.items()))
    if args.picture is not None:
        draw(scrapes, args.picture)
    print(json.dumps({"bench": "wide_serve", "levels": LEVELS, "changes": found}))


if __name__ == "__main__":
    main()
