"""Rows, the table of them, and the file and exit code that come of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.cli import REPORT, finish, main, parse
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Row, Status, counts, error_row, goal, table

GOOD = Row("gdn", "decode rows 32", Status.OK, "error 1e-6", {"error": 1e-6})
QUIET = Row("gdn", "time", Status.INFO, "3 s", brief=False)
QUIET_FAULT = Row("gdn", "decode rows 1", Status.FAIL, "error 1", brief=False)


def test_the_table_has_brief_rows_and_all_faults() -> None:
    assert list(table([GOOD, QUIET, QUIET_FAULT])) == [GOOD.line(), QUIET_FAULT.line()]


def test_an_exception_is_one_line_with_its_kind() -> None:
    row = error_row("moe", "rows 8", RuntimeError("first line\nsecond " + "x" * 500))
    assert (row.status, row.text) == (Status.ERROR, "RuntimeError: first line")
    assert error_row("moe", "rows 8", ValueError()).text == "ValueError: no text"


def test_a_smoke_run_judges_no_time() -> None:
    assert goal(False, smoke=True) is Status.INFO
    assert (goal(False, smoke=False), goal(True, smoke=False)) == (Status.FAIL, Status.OK)


@pytest.mark.parametrize(
    ("rows", "code"),
    [([GOOD, QUIET], 0), ([GOOD, QUIET_FAULT], 1), ([error_row("a", "b", OSError())], 1), ([], 1)],
)
def test_the_report(
    rows: list[Row], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finish(rows, Options(device="cpu", out=tmp_path / "new"), 1.25) == code
    report = json.loads((tmp_path / "new" / REPORT).read_text(encoding="utf-8"))
    assert report["passed"] is (code == 0)
    assert [row["name"] for row in report["found"]] == [row.name for row in rows]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["rows"] == counts(rows)
    assert sum(last["rows"].values()) == len(rows)


def test_the_folder_of_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert parse([]).out == Path("gpu_check_out")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert parse([]).out == tmp_path
    assert parse(["--out", "elsewhere"]).out == Path("elsewhere")


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--acceptance", "1.5"]])
def test_arguments_that_cannot_work(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words)


def test_an_unknown_stage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stages", "card,gdm"]) == 2
    assert "gdm; there are card, attention" in capsys.readouterr().err
