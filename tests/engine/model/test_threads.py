"""The choice of threads against given costs: calm, contended, and changing between the two."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from engine.model.threads import LAST_LOOK, WIDE, ThreadChooser


def run(
    chooser: ThreadChooser, cost: Callable[[int], float], passes: int, rows: int = 32
) -> list[int]:
    """Threads of every pass; `cost` gives the seconds on so many threads."""
    rng = Random(1)
    used = []
    for _ in range(passes):
        threads = chooser.choose("decode", rows)
        chooser.observe("decode", rows, threads, cost(threads) * rng.uniform(0.95, 1.05))
        used.append(threads)
    return used


def calm(threads: int) -> float:
    return 2.0 if threads == 1 else 1.2


def contended(threads: int) -> float:
    return 3.0 if threads == 1 else 30.0


def test_a_calm_machine_gets_all_threads() -> None:
    used = run(ThreadChooser(2), calm, 400)
    assert used[-100:].count(2) >= 97


def test_a_busy_neighbour_is_noticed_in_a_pass_and_costs_little_afterwards() -> None:
    chooser = ThreadChooser(2)
    run(chooser, calm, 200)
    used = run(chooser, contended, 2000)
    assert used[:3].count(2) <= 2
    # One pass of each look tells; looks come ever more rarely.
    assert used.count(2) <= 12
    assert run(chooser, calm, 2 * LAST_LOOK)[-50:].count(2) >= 45


def test_equal_costs_keep_the_choice() -> None:
    used = run(ThreadChooser(4), lambda threads: 1.0, 1000, rows=16)
    assert used.count(4) <= 3 * 7


def test_wide_passes_begin_with_all_threads_and_leave_them_when_they_do_not_pay() -> None:
    assert ThreadChooser(2).choose("prefill", WIDE) == 2
    assert ThreadChooser(2).choose("prefill", WIDE - 1) == 1
    used = run(ThreadChooser(2), contended, 400, rows=200)
    assert used.count(2) <= 20 + 3 * 5


def test_kinds_and_widths_are_apart() -> None:
    chooser = ThreadChooser(2)
    run(chooser, calm, 200, rows=16)
    assert chooser.choose("decode", 17) == 2
    assert chooser.choose("decode", 1) == 1
    assert chooser.choose("draft", 17) == 1


@pytest.mark.parametrize("most", [0, 1])
def test_one_core_is_one_thread(most: int) -> None:
    assert set(run(ThreadChooser(most), calm, 50)) == {1}


def test_exploring_tries_both_in_turn_and_keeps_the_faster() -> None:
    chooser = ThreadChooser(2)
    chooser.explore(True)
    tried = []
    for _ in range(4):
        tried.append(chooser.choose("decode", 8))
        chooser.observe("decode", 8, tried[-1], calm(tried[-1]))
    wide = chooser.choose("draft", 3)
    chooser.observe("draft", 3, wide, 1.0)
    chooser.explore(False)
    assert tried == [2, 1, 2, 1]
    assert chooser.choose("decode", 8) == 2
    assert chooser.choose("draft", 3) == 1, "one look decides nothing"
