"""Stages that raise, hang or die leave a row and do not stop the others."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[3]

# In a process of its own: the stages are forked, and pytest's has threads.
SCRIPT = (
    f"""
import sys, warnings
sys.path.insert(0, {str(ROOT)!r})
"""
    + """
import contextlib, io, json, os, time
from dataclasses import replace
from benchmarks.gpu.options import Machine, Options
from benchmarks.gpu.rows import Row, Status
from benchmarks.gpu.runner import Stage, run_stages

def good(options, emit):
    emit(Row("good", "a", Status.OK, f"{options.machine}"))

def raises(options, emit):
    emit(Row("raises", "before", Status.OK, ""))
    raise RuntimeError("no such card")

def hangs(options, emit):
    emit(Row("hangs", "before", Status.OK, ""))
    time.sleep(60)

def dies(options, emit):
    emit(Row("dies", "before", Status.OK, ""))
    os._exit(3)

def learn(options, rows):
    return replace(options, machine=Machine(1.0, 2.0)) if rows[0].stage == "good" else options

stages = [
    Stage("good", 20.0, good), Stage("raises", 20.0, raises), Stage("hangs", 0.5, hangs),
    Stage("dies", 20.0, dies), Stage("good", 20.0, good), Stage("late", 20.0, good),
]
seconds = iter([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 99.0])
with contextlib.redirect_stderr(io.StringIO()):
    rows = list(
        run_stages(stages, Options(seconds=50.0), learn=learn, clock=lambda: next(seconds))
    )
print(json.dumps([row.as_dict() for row in rows]))
"""
)


def test_every_fault_is_a_row(tmp_path: Path) -> None:
    rows = json.loads(run_python(SCRIPT, tmp_path))
    found = [(r["stage"], r["name"], r["status"], r["text"]) for r in rows if r["name"] != "time"]
    assert found == [
        ("good", "a", "ok", "None"),
        ("raises", "before", "ok", ""),
        ("raises", "raises", "ERROR", "RuntimeError: no such card"),
        ("hangs", "before", "ok", ""),
        ("hangs", "hangs", "ERROR", "not done after 0 s, ended"),
        ("dies", "before", "ok", ""),
        ("dies", "dies", "ERROR", "its process died without a word"),
        ("dies", "dies", "ERROR", "exit code 3"),
        ("good", "a", "ok", "Machine(bandwidth=1.0, rate=2.0)"),
        ("late", "late", "ERROR", "no time left of 50 s"),
    ]
