"""A tiny OpenAI-shaped server for client tests: fixed answers, no model, every fault on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

REPLY = ["Once", " upon", " a", " time"]


@dataclass
class FakeServer:
    """What it saw (`bodies`, `keys`) and how it misbehaves (`fault`)."""

    port: int = 0
    tokenize: bool = True
    fault: str = ""
    bodies: list[dict[str, object]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        headers = {name.lower(): value for name, value in fields.items()}
        self.keys.append(headers.get("authorization", ""))
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        body = json.loads(raw) if raw else {}
        if path == "/v1/models":
            return _answer(writer, 200, {"data": [{"id": "fake"}]})
        if path == "/tokenize" and self.tokenize:
            return _answer(writer, 200, {"tokens": list(range(1, 60)), "count": 59})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return _answer(writer, 404, {"error": {"message": f"no route {path}"}})
        self.bodies.append(body)
        if self.fault == "refuse":
            return _answer(writer, 429, {"error": {"message": "the queue is full"}})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(writer, body, chat=path.endswith("chat/completions"))
        finally:
            self.running -= 1

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, object], *, chat: bool
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if chat:
            _event(writer, _choice({"delta": {"role": "assistant", "content": ""}}))
        for word in REPLY:
            # Slow: the second word comes later than a busy machine takes to interrupt it.
            slow = self.fault == "slow" and word is not REPLY[0]
            await asyncio.sleep(10.0 if slow else 0.002)
            if self.fault == "drop":
                return False
            _event(writer, _choice({"delta": {"content": word}} if chat else {"text": word}))
        if self.fault == "error":
            _event(writer, {"error": {"message": "the engine died"}})
        _event(writer, _choice({"delta": {}, "text": "", "finish_reason": "stop"}))
        usage = {"prompt_tokens": 7, "completion_tokens": body.get("max_tokens") or len(REPLY)}
        if self.fault == "short":
            usage["completion_tokens"] = 1
        _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _choice(choice: dict[str, object]) -> dict[str, object]:
    return {"choices": [{"index": 0, "finish_reason": None} | choice], "usage": None}


def _event(writer: asyncio.StreamWriter, value: object) -> None:
    _chunk(writer, b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _answer(writer: asyncio.StreamWriter, status: int, value: object) -> bool:
    data = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return True


@asynccontextmanager
async def fake_server(**settings: object) -> AsyncIterator[FakeServer]:
    """A running fake on a free port; `settings` are FakeServer's fields."""
    fake = FakeServer(**settings)  # type: ignore[arg-type]
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
