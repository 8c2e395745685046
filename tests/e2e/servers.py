"""Real servers for tests: the console script's module, the real engine, the packaged model."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.spark_server.test_server import Server

ROOT = Path(__file__).resolve().parent.parent.parent
# What a gauge shows when the server has nothing to do.
IDLE_GAUGES = (
    "spark_requests_active",
    "spark_requests_running",
    "spark_requests_waiting",
    "spark_slots_used",
    "spark_kv_blocks_used",
)


def popen(*words: str) -> subprocess.Popen[str]:
    """`serve` with these words, warnings as errors, no settings from the environment."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "ATLAS_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "spark_server.cli", "serve", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"},
    )


@contextlib.contextmanager
def serving(*words: str, expect: tuple[str, ...] = ()) -> Iterator[Server]:
    """A server that is ready; at the end it must drain with code 0 and have printed no complaint.

    Args:
        words: options after those that all servers of the tests share.
        expect: complaints in its log that the test provokes, as patterns; each must be there.
    """
    shared = ("--port", "0", "--device", "cpu", "--threads", "1", "--memory-budget", "3GiB")
    with popen(*shared, *words) as process:
        running = Server(process)
        assert process.stderr is not None
        lines = process.stderr
        reader = threading.Thread(target=lambda: running.lines.extend(lines))
        reader.start()
        try:
            running.url = running.wait_for(r"on (http://\S+) after \d+\.\d s\n", 60)[1]
            yield running
            assert running.stop(seconds=30) == 0, running.text
        finally:
            process.kill()
            process.wait()
            reader.join(10)
    text = running.text
    for pattern in expect:
        assert re.search(pattern, text), f"no {pattern!r} in {text}"
        text = re.sub(pattern, "", text)
    for word in ("Traceback", "Warning", "error ", "warning ", "Exception"):
        assert word not in text, text


def gauges(url: str) -> dict[str, float]:
    """Every series of /metrics with its value."""
    page = httpx.get(url + "/metrics", timeout=10).text
    rows = re.findall(r"^([a-zA-Z_:][^ ]*(?:\{[^}]*\})?) (\S+)$", page, re.M)
    return {name: float(value) for name, value in rows}


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until the condition held.

    Raises:
        AssertionError: it did not in time.
    """
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def busy_gauges(url: str) -> dict[str, float]:
    """The gauges that are not at rest."""
    now = gauges(url)
    return {name: now[name] for name in IDLE_GAUGES if now[name] != 0}


def wait_idle(url: str, seconds: float = 1.0) -> None:
    """Wait until nothing runs, waits or is held."""
    wait_until(lambda: not busy_gauges(url), seconds, "gauges are idle")


def complete(url: str, **body: Any) -> httpx.Response:
    """POST /v1/completions, checked by the caller."""
    return httpx.post(url + "/v1/completions", json=body, timeout=60)
