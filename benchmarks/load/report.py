"""How a measurement is printed: a table for people, then exactly one line of JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "clients", "tok/s", "TTFT p50", "p99", "gap p50", "p99", "ms/token", "failed",
    "client cores", "api", "engine",
)  # fmt: skip


def print_table(console: Console, rows: Sequence[Mapping[str, object]], title: str) -> None:
    """One row per concurrency; latencies in milliseconds."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = (
        "TTFT and gaps between pieces of text in ms; cores are the processor time per second "
        "of the client and of the server's API and engine processes"
    )
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        errors = row["errors"]
        if isinstance(errors, dict):
            for text, count in errors.items():
                console.print(
                    f"{row['concurrency']} clients: {count} x {text}", style="red", markup=False
                )


def _cells(row: Mapping[str, object]) -> list[str]:
    def part(key: str, name: str, digits: int) -> str:
        values = row[key]
        value = values.get(name) if isinstance(values, dict) else None
        return "-" if value is None else f"{value:.{digits}f}"

    return [
        f"{row['concurrency']}",
        f"{row['tok_s']}",
        part("ttft_ms", "p50", 1),
        part("ttft_ms", "p99", 1),
        part("gap_ms", "p50", 2),
        part("gap_ms", "p99", 2),
        part("token_ms", "p50", 2),
        f"{row['failed']}",
        part("cpu_cores", "client", 2),
        part("cpu_cores", "api", 2),
        part("cpu_cores", "engine", 2),
    ]


def json_line(summary: Mapping[str, object]) -> str:
    """The whole report on one line."""
    return json.dumps(summary, separators=(", ", ": "), ensure_ascii=False)
