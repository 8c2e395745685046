"""The engine's process: takes commands from a ZMQ socket, steps the engine core, sends reports.

Started by `engine_link` as `python -m spark_server.engine_process`; knows nothing of HTTP or text.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import zmq

from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    InvariantError,
    ModelFormatError,
    QueueFullError,
    RequestError,
    UnsupportedKernelError,
)
from engine.request import EngineStats, FinishReason, GenerationRequest, SamplingParams, TokenDelta
from engine.reserve.peak import PeakMemory
from spark_server.engine_api import ModelInfo
from spark_server.logging import setup_logging
from spark_server.resolve import finish_config
from spark_server.wire import (
    Abort,
    Command,
    Event,
    Failed,
    Heartbeat,
    Launch,
    Note,
    Phase,
    Ready,
    Rejected,
    StepReport,
    Stop,
    Submit,
    decode_command,
    decode_launch,
    encode,
)

HEARTBEAT_SECONDS = 0.5
EXIT_OURS = 1
EXIT_USERS = 2
_LENGTH = struct.Struct("<I")
_PROBE_ID = -1  # the server's own ids start at 0
_PROBE_TOKENS = 4
_PROBE_STEPS = 64

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the loop needs of an engine core."""

    def add(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def step(self) -> Sequence[TokenDelta]: ...
    def prepare(self) -> None: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...


class EngineInfo(Protocol):
    """What the loop must know of the loaded model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...


class Ledger(Protocol):
    """The memory ledger as JSON values, with a list of `terms`: name, bytes, kind, why."""

    def as_dict(self) -> dict[str, Any]: ...


class BuiltEngine(Protocol):
    """What the factory returns."""

    @property
    def core(self) -> Core: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def ledger(self) -> Ledger: ...


class Progress(Protocol):
    """How the factory says that a phase of the start is done."""

    def __call__(self, phase: str, seconds: float, detail: str = "") -> None: ...


Factory = Callable[[EngineConfig, Progress], BuiltEngine]
Send = Callable[[Event], None]


def main() -> int:
    """Read the launch message from standard input and serve until told to stop."""
    # The API process decides when the engine ends; a Ctrl-C or a group-wide SIGTERM must not take
    # the engine away from requests that are being drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = io.FileIO(sys.stdin.fileno(), closefd=False)
    launch = decode_launch(_read(pipe, _LENGTH.unpack(_read(pipe, _LENGTH.size))[0]))
    folder = Path(launch.events.removeprefix("ipc://")).parent
    threading.Thread(target=_end_with_parent, args=(pipe, folder), daemon=True).start()
    setup_logging(launch.log_level)
    context = zmq.Context()
    events = context.socket(zmq.PUSH)
    commands = context.socket(zmq.PULL)
    for socket in (events, commands):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 2000)
    events.connect(launch.events)
    commands.connect(launch.commands)
    clock = StepClock()
    heartbeat = threading.Thread(
        target=_beat, args=(context, launch.events, clock), name="heartbeat", daemon=True
    )
    heartbeat.start()
    code = run(launch, commands, lambda event: events.send(encode(event)), clock)
    commands.close()
    events.close()
    sys.stdout.flush()
    sys.stderr.flush()
    clock.stop.set()
    heartbeat.join(1)
    # Waits for what is unsent, but not for ever; then ends without tearing down torch's threads.
    threading.Timer(2.5, os._exit, (code,)).start()
    context.term()
    os._exit(code)


def _read(pipe: io.FileIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = pipe.read(size - len(data))
        if not part:
            os._exit(EXIT_OURS)
        data += part
    return data


def _end_with_parent(pipe: io.FileIO, folder: Path) -> None:
    """Standard input ends when the API process does, however it ended; remove its endpoints."""
    while pipe.read(1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


class StepClock:
    """When the running step began, and the peak of memory; set by the loop, read by the heartbeat.

    Attributes:
        peak: gives bytes; 0 before the start is done.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.peak: Callable[[], int] = int
        self.stop = threading.Event()

    def age(self) -> float | None:
        began = self.began
        return None if began is None else time.monotonic() - began


def _beat(context: zmq.Context[Any], endpoint: str, clock: StepClock) -> None:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    process = psutil.Process()
    while not clock.stop.wait(HEARTBEAT_SECONDS):
        resident = int(process.memory_info().rss)
        beat = Heartbeat(clock.age(), time.process_time(), resident, clock.peak())
        socket.send(encode(beat))
    socket.close()


def run(launch: Launch, commands: zmq.Socket[bytes], send: Send, clock: StepClock) -> int:
    """Build the engine, prove it with one known answer, then serve; returns the exit code."""
    try:
        try:
            core, memory = _start(launch, send)
        except (ConfigError, ModelFormatError, UnsupportedKernelError) as error:
            send(Failed(str(error), user=True))
            return EXIT_USERS
        clock.peak = memory.read
        _loop(core, commands, send, clock, memory)
    except Exception as error:
        logger.exception("The engine failed")
        send(Failed(f"{type(error).__name__}: {error}", user=False))
        return EXIT_OURS
    return 0


def _start(launch: Launch, send: Send) -> tuple[Core, PeakMemory]:
    began = time.perf_counter()
    module, _, name = launch.factory.partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    send(Phase("imports", time.perf_counter() - began))
    config, notes = finish_config(launch.config, launch.utilization, launch.host_reserve)
    for note in notes:
        send(Note(note))

    def progress(phase: str, seconds: float, detail: str = "") -> None:
        send(Phase(phase, seconds, detail))

    built = factory(
        # The API bounds what it has in flight by running plus waiting; the same bound here, or a
        # burst that arrives before the first admission would be refused at max_waiting alone.
        replace(config, max_waiting=config.max_waiting + config.max_batch_size),
        progress,
    )
    began = time.perf_counter()
    answer = known_answer(built.core, built.info.vocab_size)
    send(Phase("known answer", time.perf_counter() - began, f"ids {answer}"))
    info = ModelInfo(
        model_id=launch.model_id,
        vocab_size=built.info.vocab_size,
        max_seq_len=config.max_seq_len,
        max_batch_size=config.max_batch_size,
        eos_token_ids=tuple(built.info.eos_token_ids),
        max_waiting=config.max_waiting,
        grammar=bool(getattr(built.info, "grammar", False)),
        created=int(time.time()),
    )
    ledger = built.ledger.as_dict()
    send(Ready(info, ledger, built.core.stats()))
    for prepare in getattr(built, "later", ()):
        prepare()
    return built.core, PeakMemory(ledger["terms"], config.device)


def known_answer(core: Core, vocab_size: int) -> tuple[int, ...]:
    """Ask the same greedy question twice; both answers must be the same ids of the vocabulary.

    Raises:
        InvariantError: no answer, an id outside the vocabulary, two answers, or work left over.
    """
    first, second = _ask(core, vocab_size), _ask(core, vocab_size)
    if first != second:
        raise InvariantError(f"the known-answer step gave {first}, then {second}")
    if not first or not all(0 <= token < vocab_size for token in first):
        raise InvariantError(f"the known-answer step gave {first} in a vocabulary of {vocab_size}")
    if core.has_work():
        raise InvariantError("the engine still has work after the known-answer step")
    return first


def _ask(core: Core, vocab_size: int) -> tuple[int, ...]:
    prompt = tuple((7 * position + 1) % vocab_size for position in range(3))
    sampling = SamplingParams(max_tokens=_PROBE_TOKENS, temperature=0.0, ignore_eos=True)
    core.add(GenerationRequest(_PROBE_ID, prompt, sampling))
    tokens: list[int] = []
    for _ in range(_PROBE_STEPS):
        for delta in core.step():
            tokens.extend(delta.token_ids)
            if delta.finish_reason is FinishReason.LENGTH:
                return tuple(tokens)
            if delta.finish_reason is not None:
                raise InvariantError(
                    f"the known-answer step ended with {delta.finish_reason.value}: {delta.error}"
                )
    raise InvariantError(f"the known-answer step did not end within {_PROBE_STEPS} steps")


def _loop(
    core: Core, commands: zmq.Socket[bytes], send: Send, clock: StepClock, memory: PeakMemory
) -> None:
    """Take what has come, step, report; without work, sleep until a command comes."""
    steps = core.stats().steps
    while True:
        busy = core.has_work()
        if not busy:
            memory.say()
        received = _receive(commands, wait=not busy)
        for command in received:
            if isinstance(command, Stop):
                return
            _apply(core, command, send)
        if core.has_work():
            clock.began = time.monotonic()
            deltas = tuple(core.step())
            stats = core.stats()
            # A step that only hands out the ends of aborted requests ran no model.
            send(StepReport(deltas, stats, stepped=stats.steps > steps))
            steps = stats.steps
            # The drafts of the next step, while clients already read this one's tokens.
            core.prepare()
            clock.began = None
        elif received:
            # Nothing will step now, so the gauges would stay where they were before the abort.
            send(StepReport((), core.stats(), stepped=False))


def _receive(commands: zmq.Socket[bytes], *, wait: bool) -> list[Command]:
    received: list[Command] = []
    if wait:
        received.append(decode_command(commands.recv()))
    # Between two steps nothing has come as a rule: 25 us to ask, 50 to be told by an exception.
    while commands.poll(0):
        received.append(decode_command(commands.recv()))
    return received


def _apply(core: Core, command: Command, send: Send) -> None:
    match command:
        case Submit(request):
            try:
                core.add(request)
            except RequestError as error:
                send(_rejection(request.request_id, error))
        case Abort(request_id):
            core.abort(request_id)


def _rejection(request_id: int, error: RequestError) -> Rejected:
    retry_after = error.retry_after if isinstance(error, QueueFullError) else None
    return Rejected(request_id, error.message, error.param, error.code, error.status, retry_after)


if __name__ == "__main__":
    sys.exit(main())
