"""`spark plan`: words to a question, tables, JSON, explanations; imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from engine.errors import ConfigError, DoesNotFitError
from spark_server.plan import main
from tests.engine.test_plan import QWEN_27B

TINY = Path(str(files("spark_server") / "assets" / "spark-tiny"))
GIB = 2**30


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spark-tiny", "--device-memory", "8GiB", "--max-batch-size", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["term", "bytes", "size", "kind", "what"]
    ends = {line.index("exact") for line in lines if " exact " in line}
    assert len(ends) == 1
    words = {line.split()[0]: line.split() for line in lines[: lines.index("")]}
    assert words["state_pool"][1] == str(64 * 221184)
    assert words["budget"][1] == str(4 * GIB)
    assert int(words["total"][1]) + int(words["free"][1]) == 4 * GIB


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(TINY), "--memory-budget", "2GiB", "--num-drafts", "3", "--json"]
    assert main(words) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["budget_bytes"] == 2 * GIB
    assert {"weights", "carry_ring", "kv_pool"} <= {t["name"] for t in parsed["terms"]}


def plan_27b(path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    path.write_text(json.dumps(QWEN_27B))
    words = "--device cuda --device-memory 121.7GiB --gpu-memory-utilization 0.7 --snapshots 16 "
    words += "--weights-bytes 39.8GiB --max-batch-size 128 --num-drafts 3 --json "
    assert main([str(path), *words.split(), "--ssm-rollback-mode", mode]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["total_bytes"] <= parsed["budget_bytes"] == 91_472_065_986
    return {term["name"]: term["bytes"] for term in parsed["terms"]}


def test_rollback_modes_of_27b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    carry, replay, snapshot = (
        plan_27b(path, mode, capsys) for mode in ("carry", "replay", "snapshot")
    )
    for terms in (carry, replay, snapshot):
        assert terms["state_pool"] == 128 * 158_859_264
        assert terms["snapshots"] == 16 * 158_859_264
    # The engine keeps its rings in float32: rows of 41,344 and of 65,920 bytes.
    assert carry["carry_ring"] == 32 * 3 * 48 * 41_344
    assert carry["carry_ring_dummy"] == 3 * 48 * 41_344
    assert replay["verify_pool"] == 32 * 158_859_264
    assert replay["replay_ring"] == 32 * 3 * 48 * 65_920
    assert replay["replay_ring_dummy"] == 3 * 48 * 65_920
    assert snapshot["verify_pool"] == 33_671_872_512 - 128 * 158_859_264
    assert snapshot["verify_dummy"] == 158_859_264 + 3 * 150_994_944 + 4 * 7_864_320
    assert carry["kv_pool"] > replay["kv_pool"] > snapshot["kv_pool"] > 0


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["--device-memory", "600MiB"], DoesNotFitError, "largest term is process_baseline"),
        (["--device", "cuda"], ConfigError, "--device-memory"),
        (["--device-memory", "80%"], ConfigError, "--gpu-memory-utilization 0.8"),
        (["--device-memory", "-1"], ConfigError, "--device-memory: the size '-1' is negative"),
        (["--device-memory", "0"], ConfigError, "--device-memory 0 is no device"),
        (["--memory-budget", "80%"], ConfigError, "--memory-budget: .*utilization 0.8"),
        (["--memory-budget", "-1"], ConfigError, "--memory-budget: the size '-1' is negative"),
        (["--memory-budget", "12 apples"], ConfigError, "unknown unit 'apples'"),
        (["--memory-budget", "9GiB", "--device-memory", "8GiB"], ConfigError, "is more than the"),
        (["--host-reserve", "9GiB", "--device-memory", "8GiB"], ConfigError, "no memory can be"),
        (["--host-reserve", "some"], ConfigError, "--host-reserve: 'some' is no size"),
        (["--gpu-memory-utilization", "80%"], ConfigError, "write 0.8 for 80 percent"),
        (["--gpu-memory-utilization", "1.5"], ConfigError, "1.5 is not a share"),
        (["--gpu-memory-utilization", "nan"], ConfigError, "nan is not a share"),
        (["--gpu-memory-utilization", "x"], ConfigError, "'x' is no number"),
        (["--gpu-memory-utilization", "0.5", "--memory-budget", "1GiB"], ConfigError, "contradict"),
        (["--max-prefill-tokens", "63"], ConfigError, "63 is below 64"),
        (["--max-seq-len", "0"], ConfigError, "--max-seq-len: 0 is below 1"),
        (["--max-seq-len", "99999"], ConfigError, "99999 exceeds the 4096 positions"),
        (["--max-batch-size", "5000"], ConfigError, "5000 is above 4096"),
        (["--num-drafts", "x"], ConfigError, "--num-drafts: 'x' is no whole number"),
        (["--kernels", "cpu", "--dtype", "bfloat16"], ConfigError, "--kernels cpu runs float32"),
        (["--explain", "apples"], ConfigError, "no such term; there are weights, state_pool,"),
        (["--no-such-flag"], ConfigError, "unrecognized arguments: --no-such-flag"),
        (["and-another"], ConfigError, "unrecognized arguments: and-another"),
    ],
)
def test_the_command_refuses(words: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        main(["spark-tiny", *words])


def test_planning_needs_neither_torch_nor_numba_nor_the_settings() -> None:
    code = (
        "import sys, spark_server.plan as p\n"
        "p.main(['spark-tiny', '--device-memory', '8GiB'])\n"
        "bad = {'torch', 'numba', 'numpy', 'safetensors', 'pydantic', 'rich'}\n"
        "sys.exit(', '.join(bad & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
