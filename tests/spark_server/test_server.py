"""The server as a process: ready line, drain, signals, exit codes, freed port, HTTP counters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import spark_server
from engine.errors import ConfigError
from engine.reserve.ledger import LedgerTerm, MemoryLedger, TermKind
from engine.reserve.preflight import Preflight
from engine.reserve.table import ledger_table, preflight_table
from spark_server.server import bind, memory_table, phase_table, url_of

pytestmark = pytest.mark.server
REPO = Path(spark_server.__file__).parent.parent


@dataclass
class Server:
    """A server process, its address and what it has printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1
        return children[0]

    def wait_for(self, pattern: str, seconds: float = 20) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.search(pattern, self.text)
            if found:
                return found
            assert self.process.poll() is None, self.text
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in {self.text}")

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


@pytest.fixture
def model(tmp_path: Path) -> str:
    packaged = Path(str(files("spark_server"))) / "assets" / "spark-tiny"
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = json.loads((packaged / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "chat_template.jinja"):
        (folder / name).symlink_to(packaged / name)
    return str(folder)


def popen(*argv: str, core: str = "", app: str = "") -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPARK_")}
    environ |= {"PYTHONWARNINGS": "error", "FAKE_CORE": core, "PYTHONPATH": str(REPO)}
    environ["FAKE_APP"] = app
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark_server.fake_server", "--device", "cpu", *argv],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env=environ,
    )


@contextlib.contextmanager
def server(*argv: str, core: str = "", app: str = "", ready: bool = True) -> Iterator[Server]:
    """A running server; afterwards no warning, no traceback, no process, no socket folder."""
    with popen(*argv, "--port", "0", core=core, app=app) as process:
        running = Server(process)
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: running.lines.extend(process.stderr or ()))
        reader.start()
        try:
            if ready:
                running.url = running.wait_for(r"on (http://\S+) after \d+\.\d s\n")[1]
            yield running
            if process.poll() is None:
                assert running.stop() == 0
        finally:
            process.kill()
            process.wait()
            reader.join(10)
        assert "Warning" not in running.text, running.text
        assert "Traceback" not in running.text, running.text


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(url + "/metrics").text, re.M)
    assert found, name
    return float(found[1])


def test_the_ready_line_the_tables_and_a_stream(model: str) -> None:
    with server(model) as running:
        assert re.search(r"Spark serves tiny on http://127\.0\.0\.1:\d+ after \d", running.text)
        for words in (
            r"phase +seconds",
            r"weights +0\.02 +1000 bytes",
            r"activations +24 +24 B +estimate +fake",
        ):
            assert re.search(words, running.text), running.text
        assert "max-seq-len auto is 4096, the model allows 8192" in running.text
        assert "dtype auto is float32" in running.text
        assert "memory-budget auto is" in running.text
        assert httpx.get(running.url + "/stream/3").text == "2\n3\n4\n"
        assert "GET /stream" not in running.text, "no access log unless asked for"
        seconds = float(re.search(r"after (\S+) s", running.text)[1])  # type: ignore[index]
        assert 0 < seconds < 20


def test_settings_reach_the_app_and_the_engine(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a\nb\n")
    with server(
        model, "--served-model-name", "other", "--api-key-file", str(keys), "--access-log"
    ) as running:
        assert "Spark serves other on" in running.text
        assert httpx.get(running.url + "/settings").json()["keys"] == 2
        running.wait_for(r'"GET /settings HTTP/1\.1" 200')


def test_http_is_counted_by_route_template(model: str) -> None:
    with server(model) as running:
        for path in ("/stream/1", "/stream/2", "/ready", "/nothing", "/else"):
            httpx.get(running.url + path)
        counter = 'spark_http_requests_total{method="GET",route="%s",status="%s"}'
        assert metric(running.url, counter % ("/stream/{count}", "2xx")) == 2
        assert metric(running.url, counter % ("/ready", "2xx")) == 1
        assert metric(running.url, counter % ("other", "4xx")) == 2


def test_loading_answers_before_the_engine_does(model: str) -> None:
    with server(model, core="start_s=2", ready=False) as running:
        port = next(c.laddr.port for _ in range(500) for c in _listening(running.process.pid))
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(url + "/ready", timeout=10).text == "loading"
        assert httpx.get(url + "/stream/1").status_code == 503
        running.wait_for("Spark serves")
        assert httpx.get(url + "/ready").status_code == 200


def _listening(pid: int) -> list[Any]:
    time.sleep(0.01)
    return [c for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]


def test_sigterm_drains_and_ends_with_0(model: str) -> None:
    with server(model, core="step_ms=20") as running, httpx.Client() as client:
        with client.stream("GET", running.url + "/stream/60", timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            engine = running.engine()
            running.process.send_signal(signal.SIGTERM)
            running.wait_for("Draining")
            assert httpx.get(running.url + "/ready").text == "draining"
            refused = httpx.get(running.url + "/stream/1")
            assert (refused.status_code, refused.text) == (503, "the server is shutting down")
            assert len(list(lines)) == 59
        assert running.process.wait(5) == 0
        assert not engine.is_running()


def test_what_drains_too_long_ends_with_an_error_event(model: str) -> None:
    with (
        server(model, "--drain-timeout", "0.3", core="step_ms=20") as running,
        httpx.stream("GET", running.url + "/stream/100000", timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert list(lines)[-1].startswith("error the server is shutting down")
        assert running.process.wait(5) == 0
        assert time.monotonic() - began < 4
        assert "Ended 1 sequences" in running.text


def test_a_second_signal_does_not_wait(model: str) -> None:
    with (
        server(model, core="step_ms=20") as running,
        httpx.stream("GET", running.url + "/stream/100000", timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGINT)
        running.wait_for("Draining")
        began = time.monotonic()
        assert running.stop(signal.SIGINT, 10) == 0
        assert time.monotonic() - began < 4


def test_a_killed_engine_comes_back_behind_the_same_port(model: str) -> None:
    with (
        server(model, core="step_ms=20") as running,
        httpx.stream("GET", running.url + "/stream/100000", timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        running.engine().kill()
        assert list(lines)[-1].startswith("error the engine ended unexpectedly")
        assert time.monotonic() - began < 2
        assert httpx.get(running.url + "/stream/1").status_code == 503
        running.wait_for("The engine is back")
        assert len(httpx.get(running.url + "/stream/5").text.split()) == 5
        assert metric(running.url, "spark_engine_restarts_total") == 1


async def _post_all(url: str, count: int, tokens: int, act: Callable[[], None]) -> list[str]:
    """`count` chats at once, every second one streamed; `act` once all streams have begun."""
    begun = [asyncio.Event() for _ in range(0, count, 2)]

    async def one(client: httpx.AsyncClient, number: int) -> str:
        body = {
            "model": "spark-tiny",
            "messages": [{"role": "user", "content": f"Hello {number}"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        path = url + "/v1/chat/completions"
        async with client.stream("POST", path, json=body, timeout=40) as response:
            text = ""
            async for part in response.aiter_text():
                text += part
                if number % 2 == 0:
                    begun[number // 2].set()
            return text

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits) as client:
        tasks = [asyncio.create_task(one(client, number)) for number in range(count)]
        await asyncio.gather(*(event.wait() for event in begun))
        act()
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize(("number", "limit"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 8.0)])
def test_32_clients_of_a_lost_engine_all_get_an_answer(number: int, limit: float) -> None:
    """The real app: streams end with an error event, whole answers with 503; then it works."""
    with server("--stuck-timeout", "3", core="step_ms=20", app="openai") as running:
        lost = 0.0

        def lose() -> None:
            nonlocal lost
            lost = time.monotonic()
            running.engine().send_signal(number)

        texts = asyncio.run(_post_all(running.url, 32, 3000, lose))
        assert time.monotonic() - lost < limit
        assert all('"error"' in text for text in texts)
        running.wait_for("The engine is back")
        assert not any(
            '"error"' in text for text in asyncio.run(_post_all(running.url, 32, 5, lambda: None))
        )
        assert metric(running.url, "spark_requests_active") == 0


def test_closed_clients_leave_the_gauges_idle(model: str) -> None:
    with server(model, core="step_ms=20") as running:
        with contextlib.ExitStack() as stack:
            readers = []
            for _ in range(16):
                response = stack.enter_context(
                    httpx.stream("GET", running.url + "/stream/100000", timeout=30)
                )
                readers.append(response.iter_lines())
                next(readers[-1])
            assert metric(running.url, "spark_requests_running") == 16
        time.sleep(0.9)
        for name in ("requests_running", "requests_waiting", "slots_used", "kv_blocks_used"):
            assert metric(running.url, f"spark_{name}") == 0, name
        assert metric(running.url, "spark_requests_active") == 0
        outcome = 'spark_requests_finished_total{endpoint="/v1/completions",outcome="abort"}'
        assert metric(running.url, outcome) == 16


@pytest.mark.parametrize(
    ("core", "code", "words"),
    [
        ("start=fit", 2, "the ledger of 2 GiB exceeds the budget of 1 GiB"),
        ("start=bug", 1, "the engine did not start: ZeroDivisionError: a bug"),
    ],
)
def test_a_failed_start_ends_the_server(model: str, core: str, code: int, words: str) -> None:
    with popen(model, "--port", "0", core=core) as process:
        _, text = process.communicate(timeout=30)
    assert process.returncode == code
    assert f"error: {words}" in text
    assert "Spark serves" not in text
    assert ("Traceback" in text) is (code == 1)


def test_a_taken_port_is_the_users_mistake_and_starts_nothing(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with popen(model, "--port", str(port)) as process:
            _, text = process.communicate(timeout=30)
    assert f"port {port} on 127.0.0.1 is taken" in text
    assert "phase" not in text


def test_bind_explains_itself() -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host no host"):
        bind("no host", 0)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_phase_table() -> None:
    assert phase_table([("a", 1.5, ""), ("weights", 0.25, "7 MB")]) == (
        "phase    seconds\na           1.50\nweights     0.25  7 MB"
    )


@pytest.mark.parametrize("whole", [True, False])
def test_the_ledger_looks_as_in_plan_after_its_way_through_json(whole: bool) -> None:
    ledger = MemoryLedger((LedgerTerm("kv", 2048, TermKind.EXACT, "2 blocks"),))
    found = Preflight(ledger, kv_blocks=2, budget=4096, free=2048)
    values = json.loads(json.dumps(found.as_dict() if whole else ledger.as_dict()))
    assert memory_table(values) == (preflight_table(found) if whole else ledger_table(ledger))
