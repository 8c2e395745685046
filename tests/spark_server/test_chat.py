"""`spark chat` over pipes, a pseudo-terminal and a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_server.chat import main
from tests.benchmarks.fake_server import FakeServer, fake_server

ROOT = Path(__file__).resolve().parents[2]
Chat = Callable[..., tuple[int, str, str, FakeServer]]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Pipe `typed` into `spark chat`; gives exit code, output, errors and the fake."""

    def run(typed: str, *flags: str, **settings: object) -> tuple[int, str, str, FakeServer]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))

        async def both() -> tuple[int, FakeServer]:
            async with fake_server(**settings) as fake:
                return await asyncio.to_thread(main, ["--url", fake.url, *flags]), fake

        code, fake = asyncio.run(both())
        out, err = capsys.readouterr()
        return code, out, err, fake

    return run


def roles(body: dict[str, object]) -> list[tuple[str, str]]:
    messages = body["messages"]
    assert isinstance(messages, list)
    return [(message["role"], message["content"]) for message in messages]


def test_answers_stream_and_the_history_is_sent(chat: Chat) -> None:
    code, out, err, fake = chat("one\ntwo\n", "--system", "Be brief.", "--api-key", "sk-1")
    assert (code, err) == (0, "")
    assert out == "Once upon a time\n" * 2
    assert fake.bodies[0]["model"] == "fake"
    assert fake.bodies[0]["stream"] is True
    assert roles(fake.bodies[1]) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "Once upon a time"),
        ("user", "two"),
    ]
    assert set(fake.keys) == {"Bearer sk-1"}


def test_reset_forgets_all_but_the_system_message(chat: Chat) -> None:
    code, out, _, fake = chat("one\n/reset\ntwo\n/exit\nthree\n", "--system", "Be brief.")
    assert code == 0
    assert "forgotten" in out
    assert len(fake.bodies) == 2, "nothing is asked after /exit"
    assert roles(fake.bodies[1]) == [("system", "Be brief."), ("user", "two")]


def test_an_unknown_command_is_not_sent(chat: Chat) -> None:
    code, out, _, fake = chat("/quit\n\n/ is a slash\n")
    assert code == 0
    assert "/exit ends" in out
    assert [roles(body) for body in fake.bodies] == [[("user", "/ is a slash")]]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("refuse", "the server answered 429: the queue is full"),
        ("error", "the engine died"),
        ("drop", "the connection to the server broke"),
    ],
)
def test_errors_are_sentences_and_the_program_goes_on(chat: Chat, fault: str, text: str) -> None:
    code, _, err, fake = chat("one\ntwo\n", fault=fault)
    assert code == 1
    assert err.count(text) == 2
    assert "Traceback" not in err
    if fault != "error":
        assert roles(fake.bodies[1]) == [("user", "two")], "an unanswered question is forgotten"


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("no server answers at http://127.0.0.1:9")
    assert main(["--url", "localhost"]) == 1
    assert "Traceback" not in capsys.readouterr().err


class Terminal:
    """`spark chat` in a pseudo-terminal."""

    def __init__(self, url: str, **env: str) -> None:
        self._master, slave = pty.openpty()
        code = "import sys; from spark_server.chat import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, "--url", url],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color", **env}, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, seconds: float = 20.0) -> None:
        """Read until `text` appears in what came since the last call."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            left = end - time.monotonic()
            ready = left > 0 and select.select([self._master], [], [], left)[0]
            assert ready, f"{text!r} not in {self.seen!r}"
            self.seen += os.read(self._master, 4096).decode()
        self.seen = self.seen.split(text, 1)[1]

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` appears; one that comes between prompt and read is lost."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.expect(text, 1.0)
        raise AssertionError(f"{text!r} not in {self.seen!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _own_terminal() -> None:
    import fcntl
    import termios

    # A shell's background job has Ctrl-C ignored, and hands that down.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def in_terminal(
    script: Callable[[Terminal], None], env: dict[str, str], fault: str
) -> FakeServer:
    async with fake_server(fault=fault) as fake:
        terminal = Terminal(fake.url, **env)
        try:
            await asyncio.to_thread(script, terminal)
        finally:
            terminal.close()
        return fake


def test_a_paste_is_one_message_and_no_color_means_none() -> None:
    raw: list[str] = []

    def script(terminal: Terminal) -> None:
        terminal.expect("> ")
        raw.append(terminal.seen)
        terminal.type("first line\nsecond line\n")
        terminal.expect("Once upon a time")
        raw.append(terminal.seen)
        terminal.expect("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(10) == 0

    fake = asyncio.run(in_terminal(script, {"NO_COLOR": "1"}, ""))
    assert [roles(body) for body in fake.bodies] == [[("user", "first line\nsecond line")]]
    assert not any("\x1b[3" in text for text in raw)


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    def script(terminal: Terminal) -> None:
        terminal.expect("> ")
        terminal.type("one\n")
        terminal.expect("Once")
        terminal.type("\x03")
        terminal.expect("[stopped]")
        terminal.expect("> ")
        terminal.interrupt_until("/exit ends")
        terminal.type("two\n")
        terminal.expect("Once")
        assert terminal.process.poll() is None

    fake = asyncio.run(in_terminal(script, {}, "slow"))
    assert roles(fake.bodies[1])[0] == ("user", "one")
    assert roles(fake.bodies[1])[1][0] == "assistant", "what was said before Ctrl-C is kept"
