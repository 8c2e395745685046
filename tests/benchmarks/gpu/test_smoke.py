"""The command itself, as on a machine with a card: only torch and what the engine's core needs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.cli import all_stages
from tests.processes import run_python
from tests.test_layering import BLOCKER

ROOT = Path(__file__).resolve().parents[3]
# A few kernels under Triton's interpreter and the parts that need none; the rest takes a minute.
STAGES = "card,silu_mul,moves,silu_mul-speed,mixers,miniature-1,transformers"

RUN = f"""
import runpy, sys
sys.argv = ["gpu_check", "--device", "cpu", "--smoke", "--stages", {STAGES!r}]
runpy.run_path({str(ROOT / "scripts" / "gpu_check")!r}, run_name="__main__")
"""


def test_the_script_runs_without_the_server_packages(tmp_path: Path) -> None:
    out = run_python(BLOCKER + RUN, tmp_path, OUT=str(tmp_path / "out")).splitlines()
    summary = json.loads(out[-1])
    assert summary["passed"]
    assert summary["rows"]["skip"] == 1
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text(encoding="utf-8"))
    found = {(row["stage"], row["name"]): row for row in report["found"]}
    assert found["transformers", "miniature-1"]["text"] == "transformers is not installed"
    assert found["silu_mul", "silu_mul"]["numbers"]["cases"] > 0
    for mode in ("carry", "replay", "snapshot"):
        assert found["miniature-1", f"{mode} 2"]["numbers"]["drafted"] > 0
    # The short table comes last and holds every verdict.
    shown = "\n".join(out).split("\n\n")[-2]
    assert "ok     silu_mul" in shown
    assert "carry, widths 1 2" in shown
    assert "carry 2 " not in shown


def test_every_stage_is_listed_with_every_kernel() -> None:
    names = [stage.name for stage in all_stages(smoke=False)]
    folders = sorted(path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py"))
    rest = ["transformers", "mixers", "qwen3.6-27b", "qwen3.5-0.8b", "invariant"]
    speeds = [f"{folder}-speed" for folder in folders]
    assert names == ["card", *folders, *rest, *speeds]
