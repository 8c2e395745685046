"""At the first start two processes compile, and the second start finds everything compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels import ahead
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
CODE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from kernels import ahead
print(ahead.compile_kernels(drafts=False), ahead.compile_kernels(drafts=False))
from kernels.gdn.cpu import _mixer
ahead._run("gdn")
print(sum(_mixer.stats.cache_hits.values()), sum(_mixer.stats.cache_misses.values()))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU compiles one at a time")
def test_what_another_process_compiled_is_found(tmp_path: Path) -> None:
    printed = run_python(CODE, tmp_path, seconds=55, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert printed.split() == ["True", "False", "1", "0"]


def test_a_failure_over_there_is_told_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(ahead, "_there", lambda operator: False)
    monkeypatch.setattr(ahead, "_run", lambda *operators: ran.extend(operators))
    monkeypatch.setattr(ahead, "_GDN", "no such operator")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert ahead.compile_kernels(drafts=False)
    assert ran == ["linear", "rms_norm", "silu_mul", "attention"]
    assert "Compiling no such operator beside the others failed: KeyError" in caplog.text
    ran.clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not ahead.compile_kernels(drafts=True)
    assert ran == []
