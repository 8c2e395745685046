"""`spark plan` of the 27B on 121.7 GiB: pinned integers, no socket, no weights, in no time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from importlib.resources import files
from typing import Any, NoReturn

import pytest

from spark_server.plan import main

MODEL = str(files("configs") / "geometries" / "qwen3.6-27b.json")
MACHINE = ["--device", "cuda", "--dtype", "bfloat16", "--device-memory", "121.7GiB"]
MACHINE += ["--gpu-memory-utilization", "0.70", "--max-seq-len", "4096"]
GIB = 2**30


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("the plan opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([MODEL, *MACHINE, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def sizes(found: dict[str, Any]) -> dict[str, int]:
    return {term["name"]: term["bytes"] for term in found["terms"] if term["bytes"]}


def test_without_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--max-batch-size", "64")
    assert found["budget_bytes"] == 91_472_065_986
    terms = sizes(found)
    assert terms["weights"] == 53_797_287_936
    assert terms["state_pool"] == 64 * 158_859_264 == 10_166_992_896
    assert terms["state_dummy"] == 158_859_264
    assert terms["rotary_tables"] == 2 * 4096 * 32 * 4
    # 16 attention layers, 4 heads of 256, two numbers of two bytes, 64 tokens a block.
    assert terms["kv_dummy"] == 16 * 4 * 256 * 2 * 2 * 64 == 4_194_304
    assert terms["kv_pool"] == found["kv_blocks"] * 4_194_304
    assert found["total_bytes"] == sum(terms.values()) <= found["budget_bytes"]
    assert found["free_bytes"] < 4_194_304


# State pools are the same in all modes; what is left for KV of 85.19 GiB is what differs.
@pytest.mark.parametrize(
    ("mode", "verify", "kv_at_least"),
    [
        ("carry", {"carry_ring": 190_513_152}, 21.1),
        ("replay", {"verify_pool": 5_083_496_448, "replay_ring": 303_759_360}, 16.1),
        ("snapshot", {"verify_pool": 13_337_886_720}, 8.2),
    ],
)
def test_one_serve_for_all_widths_starts_at_070(
    capsys: pytest.CaptureFixture[str], mode: str, verify: dict[str, int], kv_at_least: float
) -> None:
    flags = ["--max-batch-size", "128", "--num-drafts", "3", "--ssm-rollback-mode", mode]
    found = plan(capsys, *flags, "--weights-bytes", "39.8GiB", "--snapshots", "16")
    terms = sizes(found)
    assert terms["state_pool"] == 128 * 158_859_264
    assert terms["snapshots"] == 16 * 158_859_264
    assert {name: terms[name] for name in verify} == verify
    assert kv_at_least <= terms["kv_pool"] / GIB < kv_at_least + 0.1


def test_it_takes_well_under_a_second() -> None:
    command = [sys.executable, "-m", "spark_server.cli", "plan", MODEL, *MACHINE]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    # 0.3 s on a calm machine, the interpreter's start included.
    assert best < 1.0
