"""The ledger against the process: what it promises is what lives, counted without its code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# The last two: a drafter whose matrices are kept twice, with a tied head and an untied one.
SEEDS = (0, 1, 2, 3, 4, 5, 6, 9, 15, 33)
# Resident memory beyond the tensors: compiled code, and what malloc keeps.
GROWTH = 0.05


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """One process for all: the first use of a kernel is no growth of the next configuration."""
    folder = tmp_path_factory.mktemp("live")
    command = [sys.executable, "-W", "error", "-m", "tests.engine.live_tensors", str(folder)]
    done = subprocess.run(
        [*command, *map(str, SEEDS)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=59,
    )
    assert done.returncode == 0, done.stderr
    return {found["seed"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("seed", SEEDS)
def test_live_tensors_are_the_ledgers_bytes(seed: int, measured: dict[int, dict[str, Any]]) -> None:
    found = measured[seed]
    assert found["live"] + found["packed"] == found["exact"] + found["weights"], found
    assert found["exact"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_resident_memory_grows_by_what_is_reserved(
    seed: int, measured: dict[int, dict[str, Any]]
) -> None:
    found = measured[seed]
    assert found["reserved"] > 60 * 2**20, "too little to be told from noise"
    assert abs(found["growth"] / found["reserved"] - 1) < GROWTH, found


def test_both_forms_of_the_operators_were_measured(measured: dict[int, dict[str, Any]]) -> None:
    assert {found["kernels"] for found in measured.values()} == {"cpu", "naive"}
    modes = {found["config"].split()[-1] for found in measured.values()}
    assert modes == {"None", "carry", "replay", "snapshot"}
