"""The built wheel: what it carries, and that it works from a folder of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.load.processes import spawned_server
from benchmarks.load.prompts import fetch_json
from tests.processes import run_python

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a wheel, unpacked into a folder of its own; no index is asked."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in files.split("\0"):
        if name and not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(base), str(source)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = base.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(base / "site")
    return base / "site"


def test_the_wheel_carries_its_assets(wheel_folder: Path) -> None:
    for name in (
        "spark_server/assets/spark-tiny/tokenizer.json",
        "spark_server/assets/spark-tiny/config.json",
        "spark_server/assets/spark-tiny/model.safetensors",
        "configs/prometheus/prometheus.yml",
        "configs/grafana/dashboards/spark.json",
        "benchmarks/load/__init__.py",
    ):
        assert (wheel_folder / name).is_file(), name
    assert list(wheel_folder.glob("*.dist-info/licenses/LICENSE"))
    assert not (wheel_folder / "tests").exists()


@pytest.mark.server
def test_the_wheel_serves_from_another_folder(wheel_folder: Path, tmp_path: Path) -> None:
    path = {"PYTHONPATH": str(wheel_folder)}
    (module,) = run_python("import engine; print(engine.__file__)", tmp_path, **path).split()
    assert module.startswith(str(wheel_folder))

    async def chat() -> tuple[int, object]:
        flags = ["--kernels", "naive", "--threads", "1"]
        env = os.environ | path | {"PYTHONWARNINGS": "error"}
        async with spawned_server(flags, env=env, cwd=tmp_path) as (target, _):
            body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
            return await fetch_json(target, "/v1/chat/completions", body)

    status, answer = asyncio.run(chat())
    assert status == 200
    assert isinstance(answer, dict)
    assert answer["model"] == "spark-tiny"
    assert answer["usage"]["completion_tokens"] > 0


def test_transformers_imports_beside_the_wheel(wheel_folder: Path, tmp_path: Path) -> None:
    """A module named `kernels` on the path must not break a library that looks for another."""
    code = "import kernels; from transformers import Qwen3_5ForCausalLM; print(kernels.__file__)"
    assert str(wheel_folder) in run_python(code, tmp_path, PYTHONPATH=str(wheel_folder))
