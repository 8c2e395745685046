"""What a check finds, and how one that breaks is reported. Knows no check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from engine.errors import SparkError

INSTALL = "pip install -c constraints.txt . in the environment of Spark"


class Status(StrEnum):
    """OK: nothing to do. WARN: it works, but not as it could. FAIL: a server would not start."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line.

    Attributes:
        name: of the check, short and stable.
        status: see Status.
        found: what there is, with both numbers where there are two.
        way_out: what to do about it; empty when nothing is to be done.
    """

    name: str
    status: Status
    found: str
    way_out: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"status": self.status.value}


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name, Status.OK, found)


def warn(name: str, found: str, way_out: str) -> Check:
    """It works, but not as it could."""
    return Check(name, Status.WARN, found, way_out)


def fail(name: str, found: str, way_out: str) -> Check:
    """A server would not start, or would answer wrongly."""
    return Check(name, Status.FAIL, found, way_out)


def of_error(name: str, error: SparkError) -> Check:
    """An error of ours says what is wrong, then, behind the last semicolon, what to do."""
    text, _, way = str(error).rpartition("; ")
    return fail(name, text or way, way if text else "see the message")


def guarded(name: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """What a group of checks finds; one that raises is a line of its own and ends the group."""
    try:
        yield from checks()
    except SparkError as error:
        yield of_error(name, error)
    except ImportError as error:
        yield fail(name, f"{type(error).__name__}: {error}", INSTALL)
    except Exception as error:
        yield fail(name, f"{type(error).__name__}: {error}", "report this, it should not happen")
