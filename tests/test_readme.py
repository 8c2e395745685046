"""The README's commands, run as they stand; set-up commands are only held against the tree."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.load.processes import spawned_server
from spark_server.settings.fields import all_settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# They would install, recurse into this very test, or never end.
SETUP = ("make ", "docker ", "python3 -m venv", ".venv/bin/")


@dataclass(frozen=True)
class Snippet:
    """A fenced block of the README."""

    language: str
    text: str
    line: int

    @property
    def is_setup(self) -> bool:
        return all(line.startswith(SETUP) for line in self.text.strip().splitlines())


def snippets(*languages: str) -> list[Snippet]:
    found = [
        Snippet(match[1], match[2], README[: match.start()].count("\n") + 1)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    ]
    return [snippet for snippet in found if snippet.language in languages]


RUN = [snippet for snippet in snippets("bash", "python") if not snippet.is_setup]
IDS = [f"line-{snippet.line}" for snippet in RUN]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server as `make serve` starts it, on a port of its own."""
    with asyncio.Runner() as runner:
        context = spawned_server(["--threads", "1"])
        target, _ = runner.run(context.__aenter__())
        yield target.port
        runner.run(context.__aexit__(None, None, None))


def run(snippet: Snippet, port: int) -> str:
    text = snippet.text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    command = ["bash", "-euo", "pipefail"] if snippet.language == "bash" else [sys.executable]
    done = subprocess.run(
        [*command, "-c", text],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.server
@pytest.mark.parametrize("snippet", RUN, ids=IDS)
def test_a_command_of_the_readme_works(snippet: Snippet, port: int) -> None:
    out = run(snippet, port)
    assert out.strip()
    if "-s http" in snippet.text:
        assert json.loads(out)["choices"][0]["message"]["content"]
    if "-sN http" in snippet.text:
        assert out.rstrip().endswith("data: [DONE]")


def test_the_first_screen_has_the_two_commands_and_a_request() -> None:
    first = "\n".join(README.splitlines()[:40])
    assert "```bash\nmake serve\n```" in first
    assert "```bash\nmake test\n```" in first
    assert "curl -s http://127.0.0.1:8000/v1/chat/completions" in first


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"^make ([a-z-]+)", README, re.M)) | set(
        re.findall(r"`make ([a-z-]+)", README)
    )
    assert named
    assert named <= targets


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    folder = (ROOT / name).parent
    linked = [folder / path for path in re.findall(r"\]\((?!http)([^)#]+)\)", text)]
    quoted = re.findall(
        r"`((?:spark_server|engine|kernels|configs|benchmarks|docs|scripts|tests)/[^` <>*]*)`", text
    )
    compose = re.findall(r"docker-compose[\w.]*\.yml", text)
    wanted = linked + [ROOT / path for path in quoted + compose]
    assert wanted
    assert [str(path) for path in wanted if not path.exists()] == []


def test_every_package_has_its_sentence() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for package in ("spark_server", "engine"):
        for folder in (ROOT / package).iterdir():
            if (folder / "__init__.py").exists():
                assert f"| `{package}/{folder.name}/` |" in text


def test_decisions_are_dated_newest_first_and_have_numbers() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\S+) · (.+)\n\n((?:(?!^## ).*\n?)+)", text, re.M)
    assert len(entries) == len(re.findall(r"^## ", text, re.M)) > 0
    dates = [date for date, _, _ in entries]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates, reverse=True)
    assert all(body.strip() for _, _, body in entries)


def test_the_limits_name_what_is_not_built() -> None:
    limits = README[README.index("## Limits") : README.index("## More")]
    missing = {s.knob.flags[0] for s in all_settings() if not s.knob.built and s.knob.flags}
    assert set(re.findall(r"`(--[a-z-]+)`", limits)) == missing
