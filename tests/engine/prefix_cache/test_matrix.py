"""A walk through the matrix of `benchmarks.cache_matrix` on the packaged model: same bits.

`python -m benchmarks.cache_matrix` runs all 48 cells with every prompt length from 1 to 200.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cache_matrix import (
    Answer,
    Cell,
    Differences,
    Pressure,
    Work,
    Workloads,
    chunked_ops,
    compare,
    make_core,
    run,
)
from engine.reserve.ssm_reserve import SsmRollbackMode

CARRY, SNAPSHOT = SsmRollbackMode.CARRY, SsmRollbackMode.SNAPSHOT
NONE, TIGHT, RANDOM = Pressure.NONE, Pressure.TIGHT, Pressure.RANDOM
LENGTHS = (1, 63, 64, 65, 128, 129, 192, 200)
# Every value of every axis, and every workload with every kind of speculation.
CELLS = [
    Cell(True, None, "lengths"),
    Cell(True, CARRY, "lengths", RANDOM),
    Cell(True, SNAPSHOT, "lengths", TIGHT),
    Cell(True, None, "shared", TIGHT),
    Cell(True, CARRY, "shared"),
    Cell(True, CARRY, "branches", TIGHT),
    Cell(True, SNAPSHOT, "branches"),
    Cell(True, None, "chats"),
    Cell(True, CARRY, "chats"),
    Cell(True, SNAPSHOT, "chats", TIGHT),
]


@pytest.fixture(scope="module")
def works() -> dict[str, Work]:
    return Workloads(lengths=LENGTHS).small(make_core(None))


@pytest.fixture(scope="module")
def alone(works: dict[str, Work]) -> dict[str, dict[int, Answer]]:
    """Every request on its own, without cache and speculation."""
    core = make_core(None)
    return {name: run(core, work, None).answers for name, work in works.items()}


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.workload}-{c.speculation}-{c.pressure}")
def test_same_bits(cell: Cell, works: dict[str, Work], alone: dict[str, dict[int, Answer]]) -> None:
    found = run(make_core(cell), works[cell.workload], cell)
    assert compare(found.answers, alone[cell.workload]) == Differences([], [])
    if cell.pressure is not RANDOM:
        assert found.stats.hits > 0
        assert sum(found.cached.values()) == found.stats.hit_tokens


@pytest.mark.parametrize("mode", [CARRY, SNAPSHOT])
def test_drafts_behind_a_hit_come_true_as_often(mode: SsmRollbackMode) -> None:
    core, made = make_core(Cell(True, mode, "lengths")), Workloads(lengths=(120, 193, 200))
    counts = []
    for (first,), (second,) in zip(*[iter(made.by_length().waves)] * 2, strict=True):
        found = []
        for request in (first, second):
            params = replace(request.sampling, max_tokens=60, temperature=0.0)
            core.add(replace(request, sampling=params))
            stats = None
            while core.has_work():
                for delta in core.step():
                    stats = delta.stats or stats
            assert stats is not None
            found.append(stats)
        assert found[1].cached_tokens >= found[0].cached_tokens + 64
        counts += [(s.drafted_per_position, s.accepted_per_position) for s in found]
    assert counts[::2] == counts[1::2]
    assert sum(sum(accepted) for _, accepted in counts) > 100


def test_prompts_in_another_form_reuse_prompts_only_and_stay_the_same() -> None:
    """The chunked form, as on a GPU: a chat begins behind its last prompt, not its last answer."""
    ops = chunked_ops()
    reference = make_core(None, ops)
    work = Workloads().chats(reference, 1)
    want = run(reference, work, None).answers
    exact, other = (
        run(make_core(cell, ops), work, cell)
        for cell in (Cell(True, None, "chats"), Cell(True, None, "chats", exact=False))
    )
    assert compare(exact.answers, want) == Differences([], [])
    assert 0 < exact.stats.hit_tokens < other.stats.hit_tokens
    assert compare(other.answers, want).bits, "a state that decode steps left is not the same"
