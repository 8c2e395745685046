"""A ledger as plain text in aligned columns. Knows no colours and no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from engine.reserve.ledger import MemoryLedger
from engine.reserve.preflight import Preflight
from engine.reserve.sizes import format_bytes

_HEAD = ("term", "bytes", "size", "kind", "what")
# Numbers line up on the right, words on the left.
_RIGHT = (1, 2)


def ledger_table(ledger: MemoryLedger) -> str:
    """One term a line, those of 0 bytes left out, with the total last."""
    return _table(_rows(ledger))


def preflight_table(found: Preflight) -> str:
    """The ledger, then the budget and what is free of it."""
    percent = 100 * found.ledger.total / found.budget if found.budget else 0.0
    rows = [
        *_rows(found.ledger),
        _row("budget", found.budget, "", f"{percent:.1f} % taken"),
        _row("free", found.free, "", f"KV pool holds {found.kv_tokens} tokens"),
    ]
    return _table(rows)


def _rows(ledger: MemoryLedger) -> list[tuple[str, ...]]:
    rows = [
        _row(term.name, term.bytes, term.kind.value, term.why)
        for term in ledger.terms
        if term.bytes > 0
    ]
    return [*rows, _row("total", ledger.total, "", "")]


def _row(name: str, count: int, kind: str, what: str) -> tuple[str, ...]:
    return (name, str(count), format_bytes(count), kind, what)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return columns([_HEAD, *rows], _RIGHT)


def columns(lines: Sequence[tuple[str, ...]], right: Sequence[int]) -> str:
    """Lines of equally many cells in columns; those numbered in `right` line up on the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]

    def text(line: tuple[str, ...]) -> str:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(text, lines))
