"""The peak of memory beside the plan: what is read, what is left out, when a line is worth it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine.reserve.peak import PeakMemory, peak_allocated
from tests.processes import run_python

MIB = 2**20
TERMS = [
    {"name": "weights", "bytes": 60 * MIB, "kind": "exact"},
    {"name": "process_baseline", "bytes": 4 * MIB, "kind": "estimate"},
]
ROOT = Path(__file__).resolve().parents[2]


def lines(caplog: pytest.LogCaptureFixture, *peaks: int, device: str = "cpu") -> list[str]:
    """What is logged when `say` is called once for every peak, with its level."""
    left = list(peaks)
    memory = PeakMemory(TERMS, device, lambda: left.pop(0))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in peaks:
            memory.say()
    assert not left
    return [f"{r.levelname} {r.getMessage()}" for r in caplog.records]


def test_peak_plan_and_difference_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, 40 * MIB) == [
        "INFO Peak memory: 40.0 MiB resident, 64.0 MiB planned, 24.0 MiB less"
    ]
    assert lines(caplog, 70 * MIB) == [
        "WARNING Peak memory: 70.0 MiB resident, 64.0 MiB planned, 6.0 MiB more"
    ]
    assert lines(caplog, 64 * MIB) == [
        "INFO Peak memory: 64.0 MiB resident, 64.0 MiB planned, 0 B less"
    ]


def test_on_a_card_tensors_are_held_against_a_plan_without_the_context(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines(caplog, 40 * MIB, device="cuda") == [
        "INFO Peak memory: 40.0 MiB of tensors, 60.0 MiB planned, 20.0 MiB less"
    ]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    assert PeakMemory(TERMS, "cuda").read() == peak_allocated() == 123


def test_a_peak_that_hardly_rises_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    step = MIB  # a 64th of the plan
    said = lines(caplog, 40 * MIB, 40 * MIB, 41 * MIB - 1, 41 * MIB, 41 * MIB + step - 1)
    assert [line.split()[3] for line in said] == ["40.0", "41.0"]


def test_going_above_the_plan_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    said = lines(caplog, 64 * MIB, 64 * MIB + 1, 64 * MIB + 2)
    assert [line.split()[0] for line in said] == ["INFO", "WARNING"]


def test_resident_memory_is_the_process_own_peak(tmp_path: Path) -> None:
    """Also behind it, when it was given back, and whatever the parent held."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import psutil
from engine.reserve.peak import PeakMemory
read = PeakMemory([], "cpu").read
before = read()
assert before >= psutil.Process().memory_info().rss * 0.9
block = bytearray(b"x" * (64 * 2**20))
del block
print(before, read())
"""
    ballast = bytearray(b"x" * (256 * MIB))
    before, after = map(int, run_python(code, tmp_path).split())
    assert before < len(ballast)
    assert 60 * MIB < after - before < 160 * MIB
