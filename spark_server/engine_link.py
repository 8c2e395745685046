"""One life of the engine process, seen from the API process: start it, talk to it, end it.

Knows nothing of requests, restarts or HTTP; `engine_client` does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from spark_server.wire import Command, Event, Launch, decode_event, encode

_LENGTH = struct.Struct("<I")


# How long an idle OpenMP thread spins before it sleeps, unless the environment says otherwise: long
# enough to bridge the gap between two operators (1000 is not: a 4-row step takes 1.85 ms instead of
# 1.65), short enough to give its core away (libgomp's default of 300000 spins for milliseconds).
OMP_SPINS = "10000"


class EngineLink:
    """A started engine process with its two sockets.

    Args:
        launch: what to run; the endpoints are filled in here, fresh for every process, so that
            nothing of an earlier one can arrive late.
        on_exit: called on a thread of its own when the process has ended, with its exit code
            (negative: the signal that ended it).
    """

    def __init__(self, launch: Launch, on_exit: Callable[[EngineLink, int], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="spark-"))  # mode 0700: nobody else connects
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._bind(zmq.PULL, "events")
        self._commands = self._bind(zmq.PUSH, "commands")
        self._closed = False
        launch = msgspec.structs.replace(
            launch, commands=self._endpoint("commands"), events=self._endpoint("events")
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spark_server.engine_process"],
            stdin=subprocess.PIPE,
            env={"GOMP_SPINCOUNT": OMP_SPINS, **os.environ},
        )
        self._tell(encode(launch))
        threading.Thread(
            target=lambda: on_exit(self, self._process.wait()), name="engine-exit", daemon=True
        ).start()

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self._endpoint(name))
        return socket

    def _tell(self, message: bytes) -> None:
        assert self._process.stdin is not None
        # A process that died at once is reported by on_exit, not by a broken pipe here.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(_LENGTH.pack(len(message)) + message)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that turns readable when something may have come."""
        return int(self._events.getsockopt(zmq.FD))

    def send(self, command: Command) -> bool:
        """Hand a command over without waiting; False when no engine is connected."""
        if self._closed:
            return False
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[Event]:
        """All events that have come; must be read to the end, the descriptor is edge-triggered."""
        while not self._closed:
            try:
                yield decode_event(self._events.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def kill(self) -> None:
        """End the process now, also a stopped one."""
        self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close sockets and pipe and remove the endpoints; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._events.close()
        self._commands.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
