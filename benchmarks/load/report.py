"""How a measurement is printed: a table for people, then exactly one line of JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

HEAD = (
    "clients", "tok/s", "ttft50", "ttft99", "gap50", "gap99", "token", "fail",
    "client", "api", "engine",
)  # fmt: skip
LEGEND = (
    "ttft: to the first token, gap: between pieces of text, token: median per token, in ms; "
    "client, api, engine: cores in use"
)


def table(rows: Sequence[Mapping[str, object]], title: str) -> str:
    """One line per concurrency, at most 80 columns wide, then what went wrong."""
    lines = aligned([HEAD, *(_cells(row) for row in rows)])
    return "\n".join([title, "", lines, "", LEGEND, *_errors(rows)])


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Lines of cells, right-aligned by column."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(lines)


def _cells(row: Mapping[str, object]) -> tuple[str, ...]:
    def part(key: str, name: str, digits: int) -> str:
        values = row[key]
        value = values.get(name) if isinstance(values, dict) else None
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row['concurrency']}",
        f"{row['tok_s']:.0f}",
        part("ttft_ms", "p50", 1),
        part("ttft_ms", "p99", 1),
        part("gap_ms", "p50", 1),
        part("gap_ms", "p99", 1),
        part("token_ms", "p50", 2),
        f"{row['failed']}",
        part("cpu_cores", "client", 2),
        part("cpu_cores", "api", 2),
        part("cpu_cores", "engine", 2),
    )


def _errors(rows: Sequence[Mapping[str, object]]) -> list[str]:
    return [
        f"{row['concurrency']} clients: {count} x {text}"
        for row in rows
        if isinstance(errors := row["errors"], dict)
        for text, count in errors.items()
    ]


def json_line(summary: Mapping[str, object]) -> str:
    """The whole report on one line."""
    return json.dumps(summary, separators=(", ", ": "), ensure_ascii=False)
