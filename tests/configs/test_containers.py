"""Dockerfile and compose files against their linters; no container is built here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_compose_files_follow_the_compose_specification(name: str) -> None:
    run(str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", name)


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    run(str(BIN / "hadolint"), "Dockerfile")


def test_the_image_is_what_the_readme_says() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    final = text[text.rindex("FROM ") :]
    assert text.count("FROM ") == 2, "multi-stage"
    assert "USER 1000" in final
    assert "libgomp1" in final
    assert "/ready" in final[final.index("HEALTHCHECK") :]
    assert 'ENTRYPOINT ["serve"]' in final


def test_the_build_context_holds_what_the_dockerfile_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed == {
        "pyproject.toml", "constraints.txt", "README.md", "LICENSE",
        "spark_server", "engine", "kernels", "configs", "benchmarks",
    }  # fmt: skip
    assert all((ROOT / name).exists() for name in allowed)


def test_compose_builds_with_arguments_that_the_dockerfile_has() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name in ("docker-compose.yml", "docker-compose.gpu.yml"):
        compose = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
        for argument in compose["services"]["spark"]["build"]["args"]:
            assert f"ARG {argument}" in text
