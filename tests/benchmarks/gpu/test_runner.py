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
    Stage("dies", 20.0, dies), Stage("good", 20.0, good), Stage("long", 9.0, hangs),
    Stage("late", 20.0, good),
]
with contextlib.redirect_stderr(io.StringIO()):
    rows = list(run_stages(stages, Options(seconds=3.0), learn=learn))
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
        ("hangs", "before", "ok", ""),
        ("long", "long", "ERROR", found[-2][3]),
        ("late", "late", "ERROR", "no time left of 3 s"),
    ]
    assert found[-2][3].startswith("not done after")


BESIDE = (
    SCRIPT.split("stages = [")[0]
    + """
def slow(options, emit):
    emit(Row("slow", "begins", Status.OK, ""))
    time.sleep(1.0)
    emit(Row("slow", "ends", Status.OK, ""))

def quick(options, emit):
    time.sleep(0.3)
    emit(Row("quick", "a", Status.OK, ""))

stages = [
    Stage("slow", 20.0, slow, together=True), Stage("quick", 20.0, quick, together=True),
    Stage("good", 20.0, good),
]
for workers in (2, 1):
    rows = run_stages(stages, Options(), learn=lambda options, rows: options, workers=workers)
    print(*[f"{row.stage}-{row.name}" for row in rows if row.name != "time"])
"""
)


def test_stages_that_measure_no_time_run_side_by_side(tmp_path: Path) -> None:
    assert run_python(BESIDE, tmp_path).splitlines() == [
        "slow-begins quick-a slow-ends good-a",
        "slow-begins slow-ends quick-a good-a",
    ]
