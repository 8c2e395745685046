"""A walk through the matrix of `benchmarks.spec_matrix`: speculation changes no token.

`python -m benchmarks.spec_matrix` runs all 288 cells.
"""

from __future__ import annotations

import pytest

from benchmarks.spec_matrix import Cell, Tokens, make_core, make_requests, run
from engine.request import GenerationRequest
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode

CARRY, REPLAY, SNAPSHOT = (
    SsmRollbackMode.CARRY,
    SsmRollbackMode.REPLAY,
    SsmRollbackMode.SNAPSHOT,
)
ON = ControllerMode.ON
# Every value of every axis, with every mode at the widths where the modes differ most.
CELLS = [
    Cell(CARRY, "default", 5, 8, True),
    Cell(CARRY, "default", 40, 64, False),
    Cell(CARRY, "default", 16, 64, True, ON),
    Cell(CARRY, "4:4", 16, 64, True),
    Cell(CARRY, "none/64", 40, 64, True),
    Cell(CARRY, "none/64", 40, 8, False),
    Cell(REPLAY, "default", 40, 64, False),
    Cell(REPLAY, "none", 5, 8, True),
    Cell(REPLAY, "1:1/64", 40, 64, True),
    Cell(SNAPSHOT, "default", 16, 64, True),
    Cell(SNAPSHOT, "1:1", 5, 8, True),
    Cell(SNAPSHOT, "none/64", 40, 64, False),
]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(44)


@pytest.fixture(scope="module")
def alone(requests: list[GenerationRequest]) -> Tokens:
    """Every request on its own, without speculation."""
    return run(make_core(None, 8), requests, 1).tokens


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.mode}-{c.ladder}-{c.concurrency}")
def test_same_tokens(cell: Cell, requests: list[GenerationRequest], alone: Tokens) -> None:
    found = run(make_core(cell, cell.batch), requests, cell.concurrency)
    assert found.tokens == alone
    stats = found.stats
    assert stats is not None
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert sum(stats.accepted_lengths) == stats.verifies
    # Forty requests on pinned slots of 64: the short ones leave the last ones above slot 32.
    sits_uncovered = cell.batch == 64 and not cell.compaction and cell.ladder == "default"
    assert (found.uncovered_steps > 0) == sits_uncovered
