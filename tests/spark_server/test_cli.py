"""The console scripts: commands, exit codes, one line for a mistake, nothing imported in vain."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import spark_server
from spark_server.cli import COMMANDS, main, serve_main

REPO = Path(spark_server.__file__).parent.parent


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"  {name} " in page for name in COMMANDS)
    assert main([]) == 2


def test_every_command_has_a_module() -> None:
    for name, command in COMMANDS.items():
        module, _, function = command.target.partition(":")
        assert function
        assert importlib.util.find_spec(module) is not None, name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("Spark ")


def test_an_unknown_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert capsys.readouterr().err == "error: serv is no command of spark; did you mean serve\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], "--port should be a valid integer"),
        (["--speculate"], "--speculate is no setting of Spark"),
        (["/no/such/folder"], "model /no/such/folder is no folder here"),
        (["--model", __file__], "is a file"),
        (["--max-seq-len", "100000000"], "--max-seq-len 100000000 exceeds the"),
        (["--api-key-file", "/no/such/file"], "--api-key-file /no/such/file: No such file"),
        (["--host", "no host"], "--host no host"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert serve_main([*argv, "--log-level", "warning"]) == 2
    error = capfd.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_spark_serve_is_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    assert "--max-batch-size" in capsys.readouterr().out


def test_the_cli_imports_no_command() -> None:
    code = (
        "import sys, spark_server.cli as c; c.main(['--version']); "
        "bad = [m for m in ('torch', 'fastapi', 'pydantic', 'zmq', 'numba') if m in sys.modules]; "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        timeout=50,
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_folder_without_a_model_is_the_users_mistake(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert serve_main([str(tmp_path), "--log-level", "warning"]) == 2
    assert "config.json does not exist" in capfd.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert serve_main([str(tmp_path), "--log-level", "warning"]) == 2
    assert capfd.readouterr().err.startswith("error: ")
