"""`spark doctor`: every line it can print, its way out, its exit code, and this very machine."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFormatError
from engine.reserve.memory import DeviceMemory, MemoryKind
from kernels.selftest import OperatorResult, RowsResult
from spark_server.doctor import cli, machine, model, operators
from spark_server.doctor.check import Check, Status, fail, guarded, ok, warn

GIB = 2**30
PACKAGED = Path(str(files("spark_server") / "assets" / "spark-tiny"))


def only(found: Iterable[Check]) -> Check:
    (check,) = found
    return check


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the packaged model that a test may break."""
    return Path(shutil.copytree(PACKAGED, tmp_path / "model"))


def test_this_machine_is_fit_and_says_so_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", "--port", "0", "--device", "cpu", "--log-level", "error"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    checks = {check["name"]: check for check in found["checks"]}
    for name in ("python", "packages", "kernels", "torch", "triton", "processor", "memory"):
        assert checks[name]["status"] in ("ok", "warn"), checks[name]
    for name in ("kernel cache", "port", "model", "weights", "tokenizer", "chat template", "fits"):
        assert checks[name]["status"] == "ok", checks[name]
    for name in ("linear", "rms_norm", "silu_mul", "gdn", "attention", "moe", "top1"):
        assert checks[f"kernel {name}"]["found"].startswith("cpu, error ")
    assert checks["rows of gdn"]["status"] == "ok"
    assert checks["threads"]["status"] in ("ok", "warn")
    assert not any(check["way_out"] for check in checks.values() if check["status"] == "ok")


def scripted(monkeypatch: pytest.MonkeyPatch, *found: Check) -> None:
    monkeypatch.setattr(cli, "environment", lambda: iter(found[:1]))
    monkeypatch.setattr(cli, "checks", lambda settings: iter(found[1:]))


def test_a_failed_check_is_exit_code_1_and_a_warning_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, ok("a", "fine"), warn("b", "slow", "wait"))
    assert cli.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 checks, 1 warnings, 0 failed"
    scripted(monkeypatch, ok("a", "fine"), fail("c", "broken", "mend it"))
    assert cli.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"ok    {'a':30}  fine"
    assert lines[1] == f"fail  {'c':30}  broken"
    assert lines[2].strip() == "-> mend it"
    scripted(monkeypatch, fail("c", "broken", "mend it"))
    assert cli.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "checks": [{"name": "c", "status": "fail", "found": "broken", "way_out": "mend it"}],
    }


def test_a_terminal_gets_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in (("COLUMNS", "120"), ("TERM", "xterm-256color"), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    scripted(monkeypatch, ok("a", "fine"), fail("c", "broken", "mend it"))
    assert cli.main([]) == 1
    out = capsys.readouterr().out
    assert "\x1b[32mok" in out
    assert "mend it" in re.sub(r"\x1b\[[0-9;]*m", "", out)


def test_help_and_words_that_are_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "Exit code 0, or 1 if a check failed" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--porto is no setting of Spark; did you mean --port"):
        cli.main(["--porto", "1"])


def test_a_check_that_breaks_is_a_line_and_the_others_go_on() -> None:
    def breaks(error: Exception) -> Callable[[], Iterator[Check]]:
        def checks() -> Iterator[Check]:
            yield ok("first", "fine")
            raise error

        return checks

    mistake = ModelFormatError("a.safetensors is cut; it is short; download it again")
    assert list(guarded("files", breaks(mistake))) == [
        ok("first", "fine"),
        fail("files", "a.safetensors is cut; it is short", "download it again"),
    ]
    broken = list(guarded("files", breaks(ZeroDivisionError("oh"))))[1]
    assert (broken.status, broken.found) == (Status.FAIL, "ZeroDivisionError: oh")
    bare = list(guarded("files", breaks(ConfigError("only one thing to say"))))[1]
    assert bare.found == "only one thing to say"


def test_without_its_packages_the_doctor_says_so_and_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, fail("packages", "pydantic missing of 19", "pip install"), ok("b", "no"))
    assert cli.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 checks, 0 warnings, 1 failed"
    broken = only(guarded("torch", lambda: [__import__("no_such_package")]))
    assert "No module named 'no_such_package'" in broken.found
    assert broken.way_out.startswith("pip install -c constraints.txt")


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OLDEST_PYTHON", (3, 99))
    found = only(machine.python())
    assert (found.status, found.way_out) == (Status.FAIL, "use Python 3.99 or newer")


def versions(monkeypatch: pytest.MonkeyPatch, **given: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        found = given.get(name.replace("-", "_"), "real")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return real(name) if found == "real" else found

    monkeypatch.setattr(machine.metadata, "version", version)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(machine.packages()).status is Status.OK
    versions(monkeypatch, msgspec=None, jinja2=None)
    found = only(machine.packages())
    assert found.status is Status.FAIL
    assert re.fullmatch(r"msgspec, jinja2 missing of \d+", found.found)
    assert "pip install -c constraints.txt" in found.way_out


def test_hugging_faces_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert only(machine.hub_kernels()).status is Status.OK
    versions(monkeypatch, kernels="0.18.5")
    found = only(machine.hub_kernels())
    assert found.status is Status.FAIL
    assert found.found == "Hugging Face's kernels 0.18.5 shares the environment"
    assert found.way_out.startswith("pip uninstall kernels")
    versions(monkeypatch, kernels=None)
    stranger = SimpleNamespace(origin=str(tmp_path / "kernels" / "__init__.py"))
    real = machine.importlib.util.find_spec
    monkeypatch.setattr(
        machine.importlib.util,
        "find_spec",
        lambda name: stranger if name == "kernels" else real(name),
    )
    assert only(machine.hub_kernels()).status is Status.FAIL


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", Status.FAIL), ("2.11.0a0+cpu", Status.OK), ("3.0", Status.OK)],
)
def test_an_old_torch(version: str, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = only(machine.torch_build())
    assert found.status is status
    if status is Status.FAIL:
        assert found.found == "2.10.1, older than 2.11"
        assert "'torch>=2.11'" in found.way_out


@pytest.mark.parametrize(
    ("version", "device", "status", "text"),
    [
        (None, "cpu", Status.OK, "not needed on a CPU"),
        (None, "cuda", Status.FAIL, "not installed"),
        ("3.9.0", "cuda", Status.OK, "compiles the kernels"),
        ("3.5.1", "cuda", Status.FAIL, "older than 3.6"),
    ],
)
def test_triton(
    version: str | None, device: str, status: Status, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions(monkeypatch, triton=version)
    found = only(machine.triton_build(device))
    assert (found.status, text in found.found) == (status, True), found


@pytest.mark.parametrize(
    ("isa", "engines", "status"),
    [
        ("AVX2", ["fbgemm", "onednn"], Status.OK),
        ("DEFAULT", ["fbgemm"], Status.WARN),
        ("SVE256", ["qnnpack"], Status.WARN),
    ],
)
def test_processors(
    isa: str, engines: list[str], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: isa)
    fake = SimpleNamespace(supported_engines=engines)
    monkeypatch.setattr(torch.backends, "quantized", fake)
    found = only(machine.processor())
    assert (found.status, isa in found.found) == (status, True)


@pytest.mark.parametrize(
    ("available", "status"), [(20, Status.OK), (9, Status.WARN), (1, Status.FAIL)]
)
def test_memory(available: int, status: Status) -> None:
    reading = DeviceMemory(MemoryKind.HOST, 24 * GIB, available * GIB, GIB)
    found = machine.memory_line("memory", reading)
    assert found.status is status
    assert f"24.00 GiB in all, {24 - available}.00 GiB held by others" in found.found
    card = DeviceMemory(MemoryKind.DEVICE, 24 * GIB, available * GIB)
    assert machine.memory_line("device memory", card).status is not Status.OK


def test_the_kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    found = only(machine.numba_cache())
    assert (found.status, found.found) == (Status.OK, f"{tmp_path}, empty yet")
    (tmp_path / "silu_mul").mkdir()
    (tmp_path / "silu_mul" / "cpu.nbi").touch()
    assert only(machine.numba_cache()).found == f"{tmp_path}, compiled kernels there"
    monkeypatch.setattr(machine.os, "access", lambda *args: False)
    found = only(machine.numba_cache())
    assert found.status is Status.FAIL
    assert "NUMBA_CACHE_DIR" in found.way_out
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert " or " in only(machine.numba_cache()).found


@pytest.mark.parametrize(
    ("layer", "load", "status"),
    [("omp", 0.1, Status.OK), ("omp", 99.0, Status.WARN), ("workqueue", 0.1, Status.WARN)],
)
def test_threads(layer: str, load: float, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.threading_layer", lambda: layer)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, load, load))
    found = only(machine.threads())
    assert found.status is status
    assert ("libgomp1" in found.way_out) is (layer != "omp")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        found = only(guarded("port", lambda: machine.port("127.0.0.1", number)))
    assert (found.name, found.status) == ("port", Status.FAIL)
    assert f"port {number} on 127.0.0.1 is taken" in found.found
    assert "--port" in found.way_out


def weights(folder: Path) -> list[Check]:
    return list(guarded("weights", lambda: model.weights(folder)))


def text(folder: Path, template: str | None = None) -> list[Check]:
    return list(guarded("tokenizer", lambda: model.text(folder, template)))


def test_a_complete_folder(folder: Path) -> None:
    assert [check.status for check in (*weights(folder), *text(folder))] == [Status.OK] * 4


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_weights_that_are_cut_or_gone(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    found = only(weights(folder))
    assert (found.status, found.way_out) == (Status.FAIL, "download it again")
    assert "model.safetensors" in found.found
    file.unlink()
    gone = only(weights(folder))
    assert "holds no safetensors file" in gone.found
    assert gone.way_out == "download the model again"


def test_a_folder_without_its_texts(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _, found = text(folder)
    assert (found.status, "no chat template" in found.found) == (Status.FAIL, True)
    assert "--chat-template none" in found.way_out
    assert [check.status for check in text(folder, "none")] == [Status.OK, Status.OK]
    (folder / "mine.jinja").write_text("{{ messages }}")
    assert text(folder, str(folder / "mine.jinja"))[1].found.startswith("14 characters")
    (folder / "tokenizer.json").unlink()
    found = only(text(folder))
    assert (found.status, "tokenizer.json" in found.found) == (Status.FAIL, True)


@pytest.mark.parametrize(
    ("size", "ends", "status"),
    [
        (2048, (2,), Status.OK),
        (2049, (2,), Status.FAIL),
        (100, (), Status.WARN),
        (100, (7, 100), Status.WARN),
    ],
)
def test_a_tokenizer_of_another_model(size: int, ends: tuple[int, ...], status: Status) -> None:
    config: Any = SimpleNamespace(vocab_size=2048, eos_token_ids=ends)
    assert model._tokenizer(size, config).status is status


def test_a_model_that_does_not_fit() -> None:
    config = EngineConfig(str(PACKAGED), memory_budget=2 * GIB)
    assert only(model.fits(config)).status is Status.OK
    small = EngineConfig(str(PACKAGED), memory_budget=10**6)
    found = only(model.fits(small))
    assert found.status is Status.FAIL
    assert "the largest term is" in found.found
    assert re.search(r"use --memory-budget \d+MiB", found.way_out)


def test_lines_on_operators() -> None:
    right = operators.operator_line(OperatorResult("gdn", "cpu", 1e-7, 1e-5))
    assert right == ok("kernel gdn", "cpu, error 1.0e-07, at most 1e-05")
    wrong = operators.operator_line(OperatorResult("gdn", "triton", float("inf"), 1e-5))
    assert (wrong.status, "--kernels naive" in wrong.way_out) == (Status.FAIL, True)
    vary = RowsResult("gdn", ("2 sequences", "5 sequences"))
    for device, way in (("cpu", "--kernels cpu"), ("cuda", "--batch-invariant")):
        found = operators.rows_line(vary, EngineConfig("m", device=device))
        assert (found.status, way in found.way_out) == (Status.WARN, True)
        assert found.found == "other bits with 2 sequences, 5 sequences"


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["--device", "cuda", "--port", "0", "--json"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["device"]["found"] == "--device cuda: torch finds no GPU here"
    assert found["device"]["way_out"].endswith("use --device cpu")
    assert found["weights"]["status"] == "ok"


def test_a_model_that_is_not_there_leaves_the_other_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main([str(tmp_path), "--port", "0", "--json", "--device", "cpu"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["weights"]["status"] == found["device"]["status"] == "fail"
    assert found["port"]["status"] == "ok"
    assert "threads" in found
