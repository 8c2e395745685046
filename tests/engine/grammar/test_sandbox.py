"""Schemas are tried out in a process that may hang, crash or be lost without harm to the engine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.errors import EngineUnavailableError, RequestError
from engine.grammar import sandbox
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.trial import Sandbox


@pytest.fixture(scope="module")
def real(tiny_folder: Path) -> Iterator[Sandbox]:
    pytest.importorskip("xgrammar")
    process = Sandbox(str(tiny_folder), 2048, (2041,))
    process.start()
    yield process
    process.close()


def test_a_schema_becomes_a_grammar(real: Sandbox) -> None:
    assert "root ::=" in real.grammar_text(json.dumps({"type": "integer"}))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "zzz"}, 'cannot be followed: Unsupported type "zzz"'),
        ({"type": "string", "pattern": "(?=x)a"}, "Lookahead assertion is not supported"),
        ({"allOf": [{"type": "integer"}, {"maximum": 3}]}, "allOf with multiple options"),
        ({"$ref": "#/$defs/N", "$defs": {"N": {"$ref": "#/$defs/N"}}}, "Circular $ref"),
        ({"type": "string", "pattern": "^(.{0,30},?){30}$"}, "takes longer than 2 s to compile"),
    ],
)
def test_why_a_schema_is_refused(real: Sandbox, schema: object, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        real.grammar_text(json.dumps(schema))
    assert words in caught.value.message
    assert "cpp" not in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    assert time.monotonic() - began < sandbox.WALL_SECONDS
    assert "root" in real.grammar_text('{"type": "null"}'), "the next one is not harmed"


def test_a_lost_process_is_started_anew(real: Sandbox) -> None:
    real.grammar_text("{}")
    assert real._process is not None
    os.kill(real._process.pid, signal.SIGKILL)
    real._process.wait()
    with pytest.raises(EngineUnavailableError, match="cannot be compiled now"):
        real.grammar_text("{}")
    assert "root" in real.grammar_text("{}")


def test_one_that_does_not_start_is_no_hang(tiny_folder: Path) -> None:
    broken = Sandbox("x", 1, (1,), command=[sys.executable, "-c", "pass"])
    for _ in range(2):
        with pytest.raises(EngineUnavailableError):
            broken.grammar_text("{}")
    broken.close()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGPROF, "takes longer than 2 s"),
        (signal.SIGALRM, "takes longer than 2 s"),
        (signal.SIGSEGV, "takes too much memory"),
        (signal.SIGKILL, "takes too much memory"),
    ],
)
def test_the_end_of_a_child_is_a_refusal(number: int, words: str) -> None:
    def die() -> bytes:
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
        return b""

    answer = sandbox.in_child(die)
    assert answer[:1] == sandbox.REFUSED
    assert words in answer.decode()


def test_a_warning_is_a_refusal_and_so_is_a_huge_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a child, as its standard error is turned away."""
    assert sandbox.in_child(partial(sandbox.try_out, compiler, "{}"))[:1] == sandbox.TAKEN
    overlap = json.dumps({"oneOf": [{"type": "integer"}, {"type": "number"}]})
    answer = sandbox.in_child(partial(sandbox.try_out, compiler, overlap))
    assert answer[:1] == sandbox.REFUSED
    assert b"oneOf with overlapping" in answer
    monkeypatch.setattr(sandbox, "MAX_GRAMMAR_BYTES", 100)
    answer = sandbox.in_child(partial(sandbox.try_out, compiler, "{}"))
    assert answer[:1] == sandbox.REFUSED
    assert b"becomes a grammar of" in answer
    assert capfd.readouterr().err == ""


def test_a_childs_memory_is_limited() -> None:
    def hog() -> bytes:
        try:
            return b"%d" % len(bytearray(sandbox.MEMORY_BYTES + (64 << 20)))
        except MemoryError:
            return b"refused"

    assert sandbox.in_child(hog) == b"refused"


def test_frames_of_any_size() -> None:
    source, sink = os.pipe()
    for data in (b"", b"x", b"y" * 5000):
        sandbox.send(sink, data)
        assert sandbox.receive(source) == data
    os.write(sink, b"\x05\x00\x00\x00ab")
    os.close(sink)
    assert sandbox.receive(source) is None
    os.close(source)
