"""How one wide verify is split into forwards. Does not know what a row costs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvariantError
from engine.reserve.ssm_reserve import VERIFY_WY_TABLE_SEQS
from engine.reserve.terms import VERIFY_ROWS


def split_verify(
    rows: Sequence[int], *, max_rows: int = VERIFY_ROWS, max_seqs: int = VERIFY_WY_TABLE_SEQS
) -> tuple[range, ...]:
    """Consecutive runs of sequences, one per forward, each as wide as both limits allow.

    Args:
        rows: drafts + 1 of every sequence that is verified; prefill and plain rows do not count.
        max_rows: rows of one forward at most.
        max_seqs: sequences of one forward at most.

    Raises:
        InvariantError: one sequence alone has more rows than a forward carries.
    """
    runs = []
    start, used = 0, 0
    for index, count in enumerate(rows):
        if count > max_rows:
            raise InvariantError(f"a verify of {count} rows; one forward carries {max_rows}")
        if used + count > max_rows or index - start == max_seqs:
            runs.append(range(start, index))
            start, used = index, 0
        used += count
    if start < len(rows):
        runs.append(range(start, len(rows)))
    return tuple(runs)
