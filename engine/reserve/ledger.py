"""The memory ledger: terms of bytes with a reason each. Does not know how a term was computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.errors import InvariantError


class TermKind(StrEnum):
    """Whether a term must equal what is allocated, or may only come near."""

    EXACT = "exact"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class LedgerTerm:
    """One line of the ledger.

    Attributes:
        name: short and stable; names the metric and the allocation that it is compared with.
        bytes: at least 0.
        kind: exact terms are checked after start-up, estimates are not.
        why: what the number is made of, in a few words.
    """

    name: str
    bytes: int
    kind: TermKind
    why: str

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise InvariantError(f"ledger term {self.name} is {self.bytes} bytes, below 0")


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """All terms, in the order in which they are printed; names are unique."""

    terms: tuple[LedgerTerm, ...]

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise InvariantError(f"the ledger holds the term {name} {names.count(name)} times")

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    @property
    def exact(self) -> int:
        """Bytes of the terms that must equal what is allocated."""
        return sum(term.bytes for term in self.terms if term.kind is TermKind.EXACT)

    def largest(self) -> LedgerTerm:
        """The first of the largest terms.

        Raises:
            InvariantError: the ledger is empty.
        """
        if not self.terms:
            raise InvariantError("an empty ledger has no largest term")
        return max(self.terms, key=lambda term: term.bytes)

    def bytes_of(self, name: str) -> int:
        """Bytes of the term of that name.

        Raises:
            InvariantError: there is no such term.
        """
        for term in self.terms:
            if term.name == name:
                return term.bytes
        raise InvariantError(f"the ledger has no term {name}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the total and the list of terms, bytes as integers."""
        return {
            "total_bytes": self.total,
            "terms": [
                {"name": t.name, "bytes": t.bytes, "kind": t.kind.value, "why": t.why}
                for t in self.terms
            ],
        }

    def check_allocated(self, allocated: Mapping[str, int]) -> None:
        """Compare every exact term with what was allocated under its name; estimates are skipped.

        Args:
            allocated: bytes by term name; a term that is 0 bytes may be absent.

        Raises:
            InvariantError: a term differs, was allocated without being reserved, or the reverse.
        """
        kinds = {term.name: term.kind for term in self.terms}
        for name in allocated:
            if name not in kinds:
                raise InvariantError(
                    f"{name} was allocated with {allocated[name]} bytes and reserved with none"
                )
        for term in self.terms:
            found = allocated.get(term.name, 0)
            if term.kind is TermKind.EXACT and found != term.bytes:
                raise InvariantError(
                    f"{term.name}: {term.bytes} bytes were reserved and {found} allocated"
                )
