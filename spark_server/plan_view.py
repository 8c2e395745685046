"""A plan as tables and bars: with rich and colour on a terminal, plain in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine.reserve.explain import Explanation
from engine.reserve.ledger import LedgerTerm, MemoryLedger, TermKind
from engine.reserve.plan import ModePlan, PlanCase, PlanLimits
from engine.reserve.preflight import Preflight
from engine.reserve.sizes import format_bytes
from engine.reserve.table import columns, ledger_table, preflight_table

BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class PlanView:
    """What is shown; `least` is the ledger with the smallest KV pool when nothing was found."""

    case: PlanCase
    found: Preflight | None
    least: MemoryLedger | None
    limits: PlanLimits
    modes: tuple[ModePlan, ...]

    @property
    def ledger(self) -> MemoryLedger:
        """The terms that are drawn."""
        ledger = self.found.ledger if self.found is not None else self.least
        assert ledger is not None
        return ledger


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the chart; `share` is of the device's memory."""

    name: str
    bytes: int
    share: float
    kind: str


def bars(view: PlanView) -> tuple[Bar, ...]:
    """Every term above 0, largest first, then what the budget and others leave of the device."""
    total = view.case.memory.total
    terms = sorted(view.ledger.terms, key=lambda term: -term.bytes)
    found = [Bar(t.name, t.bytes, t.bytes / total, t.kind.value) for t in terms if t.bytes]
    free = 0 if view.found is None else view.found.free
    rest = {
        "(free budget)": free,
        "(others)": view.case.memory.others,
        "(not ours)": total - view.ledger.total - free - view.case.memory.others,
    }
    return (*found, *(Bar(name, n, n / total, "rest") for name, n in rest.items() if n > 0))


def print_plan(view: PlanView) -> None:
    """Write it to standard output, as the terminal or the pipe behind it can take it."""
    if sys.stdout.isatty():
        _rich_plan(view)
    else:
        print(plain_plan(view))


def plain_plan(view: PlanView) -> str:
    """The whole plan as text without colour."""
    table = preflight_table(view.found) if view.found is not None else ledger_table(view.ledger)
    parts = [table, _plain_bars(view), _plain_limits(view)]
    if view.modes:
        parts.append(_plain_modes(view))
    return "\n\n".join(parts)


def _plain_bars(view: PlanView) -> str:
    drawn = bars(view)
    width = max(len(bar.name) for bar in drawn)
    lines = [f"share of {format_bytes(view.case.memory.total)}"]
    lines += [
        f"{bar.name:{width}}  {_marks(bar.share, '#'):{BAR_WIDTH}}  {100 * bar.share:5.1f} %"
        for bar in drawn
    ]
    return "\n".join(lines)


def _marks(share: float, mark: str) -> str:
    """At least one mark for anything, and a full bar for a term that is larger than the device."""
    return mark * min(max(round(share * BAR_WIDTH), 1), BAR_WIDTH)


def _limit_rows(view: PlanView) -> list[tuple[str, str, str]]:
    config, limits = view.case.config, view.limits
    share = "none"
    if limits.lowest_share is not None:
        share = f"{limits.lowest_share:.2f} to {limits.highest_share:.2f}"
    return [
        ("setting", "now", "fits, the others held"),
        ("--max-batch-size", str(config.max_batch_size), _up_to(limits.max_batch_size)),
        ("--max-seq-len", str(config.max_seq_len), _up_to(limits.max_seq_len)),
        ("--gpu-memory-utilization", view.case.budget.why, share),
    ]


def _up_to(limit: int | None) -> str:
    return "none" if limit is None else f"up to {limit}"


def _mode_rows(modes: Sequence[ModePlan]) -> list[tuple[str, ...]]:
    head = ("speculation", "without KV", "tokens of KV", "lowest utilisation")
    return [
        head,
        *(
            (
                mode.mode,
                format_bytes(mode.without_kv),
                "does not fit" if mode.kv_tokens is None else str(mode.kv_tokens),
                "none" if mode.lowest_share is None else f"{mode.lowest_share:.2f}",
            )
            for mode in modes
        ),
    ]


def _plain_limits(view: PlanView) -> str:
    return columns(_limit_rows(view), right=())


def _plain_modes(view: PlanView) -> str:
    return columns(_mode_rows(view.modes), right=(1, 2, 3))


def print_explanation(told: Explanation) -> None:
    """One term: bytes, formula in words, formula in numbers."""
    term = told.term
    print(f"{term.name}: {term.bytes} bytes ({format_bytes(term.bytes)}), {term.kind.value}")
    print(f"  = {told.words}")
    print(f"  = {told.numbers}")
    if term.why != told.words:
        print(f"  {term.why}")


_COLOURS = {TermKind.EXACT.value: "green", TermKind.ESTIMATE.value: "yellow", "rest": "dim"}


def _rich_plan(view: PlanView) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    total, drawn = view.case.memory.total, {bar.name: bar for bar in bars(view)}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("term", "size", "bytes", "kind"):
        table.add_column(name, justify="right" if name in ("size", "bytes") else "left")
    table.add_column(f"share of {format_bytes(total)}", no_wrap=True)
    table.add_column("what", style="dim")
    whys = {term.name: term.why for term in _terms(view)}
    for bar in drawn.values():
        colour = _COLOURS[bar.kind]
        mark = Text(_marks(bar.share, "█"), style=colour)
        mark.append(f" {100 * bar.share:.1f} %", style="default")
        kind = "" if bar.kind == "rest" else bar.kind
        row = (bar.name, format_bytes(bar.bytes), str(bar.bytes), kind, mark)
        table.add_row(*row, whys.get(bar.name, ""))
    console.print(table)
    console.print(_summary(view), style="bold")
    console.print()
    for rows in (_limit_rows(view), _mode_rows(view.modes) if view.modes else []):
        if rows:
            small = Table(*rows[0], box=None, header_style="bold", pad_edge=False)
            for line in rows[1:]:
                small.add_row(*line)
            console.print(small)
            console.print()


def _terms(view: PlanView) -> tuple[LedgerTerm, ...]:
    return view.ledger.terms


def _summary(view: PlanView) -> str:
    total, budget = view.ledger.total, view.case.budget
    text = f"total {format_bytes(total)} of a budget of {format_bytes(budget.bytes)}"
    if view.found is None:
        return f"{text}: does not fit"
    return f"{text}; the KV pool holds {view.found.kv_tokens} tokens"
