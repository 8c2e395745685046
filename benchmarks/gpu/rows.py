"""What a check found, one row each, and how rows are printed and judged. Knows no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

Number = int | float | str | bool | None


class Status(StrEnum):
    """OK and FAIL are verdicts, INFO is a number without a limit.

    SKIP is named and expected, ERROR is an exception, a time limit or a lost process.
    """

    OK = "ok"
    FAIL = "FAIL"
    INFO = "info"
    SKIP = "skip"
    ERROR = "ERROR"


BAD = frozenset({Status.FAIL, Status.ERROR})


@dataclass(frozen=True, slots=True)
class Row:
    """One finding.

    Attributes:
        stage: that found it.
        name: what was looked at.
        status: the verdict.
        text: numbers with units for people, one phrase.
        numbers: the same and more for programs.
        brief: it belongs in the short table at the end.
    """

    stage: str
    name: str
    status: Status
    text: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    brief: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def line(self) -> str:
        """Fixed columns, readable without colour."""
        return f"{self.status.value:5}  {self.stage:12}  {self.name:42}  {self.text}".rstrip()


def verdict(good: bool) -> Status:
    """OK or FAIL."""
    return Status.OK if good else Status.FAIL


def goal(good: bool, *, smoke: bool) -> Status:
    """OK or FAIL on a card; a smoke run's times mean nothing."""
    return Status.INFO if smoke else verdict(good)


def error_row(stage: str, name: str, error: BaseException) -> Row:
    """An exception as a row: its kind and the first line of its text."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else "no text"
    return Row(stage, name, Status.ERROR, f"{type(error).__name__}: {first}"[:200])


def table(rows: Iterable[Row]) -> Iterator[str]:
    """The brief rows, and every row that is bad."""
    for row in rows:
        if row.brief or row.status in BAD:
            yield row.line()


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows have each status."""
    found = dict.fromkeys((status.value for status in Status), 0)
    for row in rows:
        found[row.status.value] += 1
    return found
