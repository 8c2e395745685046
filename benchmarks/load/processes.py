"""The processes of the target: starts a server for a measurement, and reads processor time by pid.

Knows nothing of HTTP beyond asking whether a server is ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.load.prompts import fetch_json
from benchmarks.load.wire import Target, WireError

START_TIMEOUT = 300.0
STOP_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of processor time used so far. `api` and `engine` are None for a remote server."""

    wall: float
    client: float
    api: float | None = None
    engine: float | None = None

    def shares(self, later: CpuTimes) -> dict[str, float | None]:
        """Cores used on average between this reading and a later one, by role."""
        wall = later.wall - self.wall

        def share(before: float | None, after: float | None) -> float | None:
            if before is None or after is None or wall <= 0:
                return None
            return round((after - before) / wall, 3)

        return {
            "client": share(self.client, later.client),
            "api": share(self.api, later.api),
            "engine": share(self.engine, later.engine),
        }


def read_cpu(server_pid: int | None) -> CpuTimes:
    """Processor time of this process, of the server and of the server's children (the engine)."""
    wall, own = time.perf_counter(), time.process_time()
    if server_pid is None:
        return CpuTimes(wall, own)
    try:
        server = psutil.Process(server_pid)
        children = server.children(recursive=True)
        return CpuTimes(wall, own, _seconds(server), sum(map(_seconds, children)))
    except psutil.NoSuchProcess:
        return CpuTimes(wall, own)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerStartError(Exception):
    """The spawned server ended or was not ready in time; the text carries its last output."""


@asynccontextmanager
async def spawned_server(
    flags: Sequence[str],
    api_key: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[tuple[Target, int]]:
    """Run `serve` with `flags` on a free port until the block ends; gives target and pid.

    Raises:
        ServerStartError: it ended before it was ready, or took longer than START_TIMEOUT.
    """
    target = Target("127.0.0.1", free_port(), api_key=api_key)
    command = [sys.executable, "-m", "spark_server.cli", "serve", *flags]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [*command, "--port", str(target.port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
        )
        try:
            await _wait_ready(server, target, log.fileno())
            yield target, server.pid
        finally:
            _stop(server)


async def _wait_ready(server: subprocess.Popen[bytes], target: Target, log: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerStartError(
                f"the server ended with exit code {server.returncode}:\n{_tail(log)}"
            )
        try:
            status, _ = await fetch_json(target, "/ready")
            if status == 200:
                return
        except (OSError, WireError):
            pass
        await asyncio.sleep(0.1)
    raise ServerStartError(f"the server was not ready after {START_TIMEOUT:g} s:\n{_tail(log)}")


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, 4000, max(0, size - 4000)).decode("utf-8", "replace")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it; children end with their parent's pipe."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
