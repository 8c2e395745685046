"""What the API process and the engine process say to each other, as msgpack.

The engine's own dataclasses travel inside; nothing here knows sockets or processes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.request import EngineStats, GenerationRequest, TokenDelta
from spark_server.engine_api import ModelInfo


class Launch(msgspec.Struct, frozen=True):
    """What a new engine process is told, over its standard input.

    Attributes:
        factory: `module:function` that builds the engine.
        commands: endpoint on which the engine receives.
        events: endpoint to which the engine sends.
        config: may still say `auto` for device, dtype and budget.
        utilization: share of the device's memory that the engine may take, or None for the default.
        host_reserve: bytes kept free in memory that the host uses too, or None for the default.
        model_id: the name under which clients know the model.
    """

    factory: str
    commands: str
    events: str
    config: EngineConfig
    model_id: str
    utilization: float | None = None
    host_reserve: int | None = None
    log_level: str = "info"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new sequence."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client of a sequence has gone; no delta of it is wanted any more."""

    request_id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the engine process."""


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A sentence for the log, e.g. what `auto` resolved to."""

    text: str


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """One phase of the start is done."""

    name: str
    seconds: float
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes work. `ledger` are JSON values with a list of `terms`."""

    info: ModelInfo
    ledger: dict[str, Any]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends by itself; `user` says that the user can repair it, so no retry helps."""

    message: str
    user: bool


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine does not take a request; a RequestError in plain values."""

    request_id: int
    message: str
    param: str | None
    code: str | None
    status: int
    retry_after: int | None = None


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """All that one step produced, for all sequences; `stepped` is False when no step ran."""

    deltas: tuple[TokenDelta, ...]
    stats: EngineStats
    stepped: bool


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent twice a second by a thread of its own, also while a step runs.

    Attributes:
        step_age: seconds since the running step began, or None between steps.
        cpu_seconds: CPU time of the process so far.
        resident: resident bytes of the process.
        peak: bytes that the engine held at most, on a card of tensors; 0 before the start is done.
    """

    step_age: float | None
    cpu_seconds: float
    resident: int
    peak: int


Command = Submit | Abort | Stop
Event = Note | Phase | Ready | Failed | Rejected | StepReport | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
decode_launch = msgspec.msgpack.Decoder(Launch).decode
