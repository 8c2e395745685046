"""`spark plan`: words to a question, tables, JSON, explanations; imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

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


def test_a_float16_pool_of_27b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_27B))
    words = "--device cuda --device-memory 121.7GiB --weights-bytes 39.8GiB --max-batch-size 128 "
    words += "--ssm-h-dtype f16-pool --snapshots 16 --json"
    assert main([str(path), *words.split()]) == 0
    terms = {t["name"]: t["bytes"] for t in json.loads(capsys.readouterr().out)["terms"]}
    blob = 150_994_944 // 2 + 7_864_320
    assert (terms["state_pool"], terms["snapshots"]) == (128 * blob, 16 * blob)
    assert terms["state_stage"] == 128 * 150_994_944 // 48
    assert main([str(path), *words.split()[:-1], "--explain", "state_pool"]) == 0
    assert "128 * 48 * (48 * 128 * 128 * 2 + 10240 * 4 * 4)" in capsys.readouterr().out


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


def values(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON of a plan, also of one that does not fit."""
    with contextlib.suppress(DoesNotFitError):
        main([*words, "--json"])
    parsed = json.loads(capsys.readouterr().out)
    assert isinstance(parsed, dict)
    return parsed


CARD = ("--device", "cuda", "--num-drafts", "3")


@pytest.mark.parametrize(
    ("name", "device", "tokens", "batch", "length", "share"),
    [
        ("qwen3.5-0.8b", "24GB", 1_190_336, 701, 262_144, 0.20),
        ("qwen3.5-0.8b", "80GiB", 5_076_288, 2896, 262_144, 0.06),
        ("qwen3.5-0.8b", "121.7GiB", 7_887_232, 4096, 262_144, 0.04),
        ("qwen3.6-27b", "24GB", None, None, None, None),
        ("qwen3.6-27b", "80GiB", 178_240, 105, 177_600, 0.76),
        ("qwen3.6-27b", "121.7GiB", 756_992, 350, 262_144, 0.50),
        ("qwen3.6-35b-a3b", "24GB", None, None, None, None),
        ("qwen3.6-35b-a3b", "80GiB", 37_440, 42, 36_992, 0.90),
        ("qwen3.6-35b-a3b", "121.7GiB", 1_826_176, 602, 262_144, 0.59),
    ],
)
def test_three_models_on_three_devices(
    name: str,
    device: str,
    tokens: int | None,
    batch: int | None,
    length: int | None,
    share: float | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = values(capsys, name, *CARD, "--device-memory", device)
    assert found["fits"] is (tokens is not None)
    assert found.get("kv_tokens") == tokens
    assert (found["total_bytes"] <= found["budget_bytes"]) is found["fits"]
    assert found["limits"] == {
        "max_batch_size": batch,
        "max_seq_len": length,
        "gpu_memory_utilization": {"lowest": share, "highest": 1.0},
    }
    kept = [mode["kv_tokens"] for mode in found["rollback_modes"] if mode["kv_tokens"]]
    assert kept == sorted(kept, reverse=True), "off, carry, replay and snapshot leave less and less"


def test_where_only_some_modes_fit_the_plan_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, "qwen3.6-35b-a3b", *CARD, "--device-memory", "80GiB")
    modes = {mode["mode"]: mode for mode in found["rollback_modes"]}
    assert [name for name, mode in modes.items() if mode["kv_tokens"]] == ["off", "carry"]
    assert modes["replay"]["lowest_gpu_memory_utilization"] == 0.92


def test_a_plan_that_does_not_fit_is_printed_and_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(DoesNotFitError, match=r"24\.00 GB|22\.35 GiB") as caught:
        main(["qwen3.6-27b", "--device", "cuda", "--device-memory", "24GB"])
    out = capsys.readouterr().out
    assert "53797287936" in out
    assert out.splitlines()[-1].split()[0] == "snapshot"
    assert "does not fit" in out
    found = values(capsys, "qwen3.6-27b", "--device", "cuda", "--device-memory", "24GB")
    assert found["error"] == str(caught.value)
    assert found["total_bytes"] > found["budget_bytes"] == int(24e9 * 0.9)


def test_the_plain_chart_is_to_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3.6-27b", *CARD, "--device-memory", "80GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    chart = {line.split()[0]: line for line in lines if line.endswith(" %") and "#" in line}
    assert chart["weights"].count("#") == round(40 * 54646738944 / (80 * GIB)) == 25
    assert chart["kv_dummy"].count("#") == 1
    shares = [float(line.split()[-2]) for line in chart.values()]
    assert abs(sum(shares) - 100) < 0.1 * len(shares), "the device is drawn whole"
    assert all(line.isascii() for line in lines)


def test_a_terminal_gets_colour_and_the_same_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm-256color"), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["qwen3.6-27b", *CARD, "--device-memory", "80GiB"]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert "█" * 25 in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert "54646738944" in plain
    assert re.search(r"--max-batch-size +32 +up to 105", plain)
    assert re.search(r"replay +[\d.]+ GiB +101312", plain)


@pytest.mark.parametrize("term", ["state_pool", "kv_pool", "logits", "weights"])
def test_a_term_is_explained_with_its_bytes(term: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["qwen3.6-27b", *CARD, "--device-memory", "80GiB", "--explain", term]
    assert main(words) == 0
    first, _, formula, *_ = capsys.readouterr().out.splitlines()
    size = int(first.removeprefix(f"{term}: ").split()[0])
    assert int(eval(formula.strip().removeprefix("= "))) == size
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["bytes"]) == (term, size)
    assert f"  = {told['numbers']}" == formula


def test_a_term_of_a_plan_that_does_not_fit_is_explained_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["qwen3.6-27b", "--device", "cuda", "--device-memory", "24GB", "--explain", "kv_pool"]
    assert main(words) == 0
    assert "= 64 * 16 * 2 * 4 * 256 * 64 * 2" in capsys.readouterr().out


def test_this_machine_is_asked_when_no_device_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = values(capsys, "spark-tiny")["device_memory"]
    assert found["kind"] == "host"
    assert 0 < found["available_bytes"] <= found["total_bytes"]
    assert found["host_reserve_bytes"] == found["total_bytes"] // 32


def test_a_gpu_that_shares_the_hosts_memory_keeps_some_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("spark-tiny", "--device", "cuda", "--device-memory", "100GiB")
    shared = values(capsys, *words, "--host-reserve", "20GiB")
    assert shared["device_memory"]["kind"] == "unified"
    assert shared["budget_bytes"] == 80 * GIB
    assert shared["limits"]["gpu_memory_utilization"]["highest"] == 0.8
    assert values(capsys, *words)["budget_bytes"] == 90 * GIB


def test_a_preset_stands_for_its_settings_and_flags_win(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text(
        '[model]\nmodel = "spark-tiny"\ndevice = "cpu"\n[batching]\nmax_batch_size = 7\n'
        'max_seq_len = 640\n[memory]\nmemory_budget = "2GiB"\n'
        "[speculation]\nspeculative = true\nnum_drafts = 2\n"
    )
    words = ("--num-drafts", "2", "--max-seq-len", "640", "--device-memory", "8GiB")
    same = ("spark-tiny", "--max-batch-size", "7", *words)
    device = ("--device-memory", "8GiB")
    assert values(capsys, str(preset), *device) == values(capsys, *same, "--memory-budget", "2GiB")
    shorter = values(capsys, str(preset), *device, "--max-batch-size", "3", "--num-drafts", "0")
    assert shorter["budget_bytes"] == 2 * GIB
    assert "drafter_log" not in {term["name"] for term in shorter["terms"]}
    share = values(capsys, "--gpu-memory-utilization", "0.75", str(preset), *device)
    assert share["budget_bytes"] == 6 * GIB
    with pytest.raises(ConfigError, match=r"--config .*none\.toml: No such file"):
        main([str(tmp_path / "none.toml")])
    preset.write_text("[batching]\nmax_batch = 7\n")
    with pytest.raises(ConfigError, match="max_batch is no setting, did you mean max_batch_size"):
        main([str(preset)])


def test_every_preset_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for path in (files("configs") / "presets").iterdir():
        assert values(capsys, str(path), "--device-memory", "32GiB")["fits"], path.name


def test_a_model_that_is_elsewhere_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3.5-0.8B is no model folder .*, qwen3.6-27b"):
        main(["Qwen/Qwen3.5-0.8B"])


def test_without_a_ladder_every_slot_is_deep(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen3.6-27b", *CARD, "--device-memory", "500GiB", "--ssm-rollback-mode", "snapshot")

    def pool(*more: str) -> int:
        found = values(capsys, *words, "--max-batch-size", "128", *more)
        return int(next(t["bytes"] for t in found["terms"] if t["name"] == "verify_pool"))

    h, conv = 150_994_944, 7_864_320
    checkpoint = h + conv
    assert pool() == 32 * checkpoint + (8 * 3 + 24) * h + 32 * 4 * conv
    assert pool("--no-ladder") == 32 * (checkpoint + 3 * h + 4 * conv)
    assert pool("--full-width") == 128 * (checkpoint + 3 * h + 4 * conv)
    assert pool("--mtp-max-seqs", "48") == 48 * checkpoint + (24 + 40) * h + 48 * 4 * conv
