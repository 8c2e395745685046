"""Every term explains itself: the arithmetic that is shown gives the very bytes of the ledger."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.reserve.explain import explain
from engine.reserve.memory import DeviceMemory, MemoryKind
from engine.reserve.plan import plan_case
from engine.reserve.ssm_reserve import SpeculationPolicy, SsmRollbackMode

GEOMETRIES = Path(str(files("configs") / "geometries"))
TINY = Path(str(files("spark_server") / "assets" / "spark-tiny"))
LARGE = DeviceMemory(MemoryKind.DEVICE, 2**42, 2**42)
CPU = EngineConfig("model", max_batch_size=40, max_seq_len=1000)
NAIVE = replace(CPU, kernels="naive", kv_tokens=7000, decode_ring_slots=4)
CUDA = replace(CPU, snapshot_slots=5, device="cuda", dtype="bfloat16", max_prefill_tokens=1024)
GRAPHS = replace(CUDA, kernels="triton")
POLICIES = [SpeculationPolicy()] + [
    SpeculationPolicy(drafts, mode, full_width=full)
    for drafts in (1, 3)
    for mode in SsmRollbackMode
    for full in (False, True)
]


def value_of(numbers: str) -> int:
    assert re.fullmatch(r"[\d+*() ]+", numbers), numbers
    return int(eval(numbers))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    "config", [CPU, NAIVE, CUDA, GRAPHS], ids=["cpu", "naive", "cuda", "graphs"]
)
@pytest.mark.parametrize("tiles", [False, True])
def test_the_numbers_give_the_bytes(
    config: EngineConfig, policy: SpeculationPolicy, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.linear.form.TILES", tiles)
    for source in (*sorted(GEOMETRIES.iterdir()), TINY):
        asked = plan_case(source, config, LARGE, policy=policy)
        found = asked.preflight()
        for term in found.ledger.terms:
            told = explain(
                asked.reserve, config, found.ledger, found.kv_blocks, term.name, asked.parts
            )
            assert value_of(told.numbers) == term.bytes, told
            assert told.term == term
            assert told.words
            assert (told.words != term.why) or term.bytes == 0, f"{term.name} has no formula"


def test_given_weights_are_not_taken_apart() -> None:
    asked = plan_case(TINY, CPU, LARGE, weights_bytes=12345)
    found = asked.preflight()
    told = explain(asked.reserve, CPU, found.ledger, found.kv_blocks, "weights", asked.parts)
    assert (told.words, told.numbers) == ("given by --weights-bytes", "12345")


def test_an_unknown_term_lists_those_that_there_are() -> None:
    asked = plan_case(TINY, CPU, LARGE)
    found = asked.preflight()
    with pytest.raises(ConfigError, match=r"--explain kv: no such term; there are weights, state"):
        explain(asked.reserve, CPU, found.ledger, found.kv_blocks, "kv")
