"""Checkpoints are made once per session; transformers takes seconds for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.model.hybrid import HybridModel
from tests.oracle import ours
from tests.oracle.checkpoints import Oracle, make

# Every family and every head ratio, without the full product of both.
CASES = [
    ("qwen3_5", 1),
    ("qwen3_5", 2),
    ("qwen3_5", 3),
    ("qwen3_5_moe", 2),
    ("qwen3_5_moe", 3),
    ("qwen3_next", 1),
    ("qwen3_next", 3),
]


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Oracle]:
    torch.set_num_threads(1)
    made: dict[tuple[str, int], Oracle] = {}

    def get(family: str, ratio: int) -> Oracle:
        key = (family, ratio)
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(f"{family}-{ratio}")
            seed = 2 if family == "qwen3_next" else 3
            made[key] = make(folder, family, ratio, tied=ratio == 2, seed=seed)
        return made[key]

    return get


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-r{case[1]}")
def oracle(request: pytest.FixtureRequest, oracles: Callable[[str, int], Oracle]) -> Oracle:
    return oracles(*request.param)


@pytest.fixture(params=["cpu", "naive"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(oracle: Oracle, kernels: str) -> HybridModel:
    return ours.build(oracle.folder, kernels)
