"""HTTP/1.1 over asyncio transports with as little work per byte as Python allows.

An HTTP client library costs more processor time per streamed token than the server's own writing
of it, which would be measured as the server's. Knows nothing of OpenAI's shapes; no redirects, no
compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

OnBody = Callable[[bytes, float], None]


class WireError(Exception):
    """The server closed the connection too early or does not speak HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `base` is the path before `/v1`, without a slash at its end."""

    host: str
    port: int
    tls: bool = False
    base: str = ""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """Read a URL such as http://127.0.0.1:8000 or https://host/path/v1.

        Raises:
            ValueError: the URL has no http or https scheme, or no host.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL of the form http://host:port")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, base, api_key)

    def head(self, method: str, path: str, length: int) -> bytes:
        """Request line and headers, ready to be followed by `length` bytes."""
        auth = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"{method} {self.base}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{auth}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode("ascii")


@dataclass(slots=True)
class _Exchange:
    """One answer on its way: `left` is what remains of a body or chunk, None until it is known."""

    on_body: OnBody
    done: asyncio.Future[int]
    status: int = 0
    chunked: bool = False
    left: int | None = None
    keep_alive: bool = True
    buffer: bytearray = field(default_factory=bytearray)


class Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None

    @classmethod
    async def open(cls, target: Target) -> Connection:
        """Connect, with TLS if the target wants it.

        Raises:
            OSError: the server does not answer.
        """
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if target.tls else None
        _, protocol = await loop.create_connection(cls, target.host, target.port, ssl=context)
        return protocol

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def request(self, head: bytes, body: bytes, on_body: OnBody) -> int:
        """Send one request, hand each piece of the body to `on_body(piece, time)`, give the status.

        Raises:
            WireError: the connection broke before the answer was complete.
        """
        if self._transport is None or self._transport.is_closing():
            raise WireError("the connection is closed")
        self._exchange = _Exchange(on_body, asyncio.get_running_loop().create_future())
        self._transport.write(head + body)
        try:
            return await self._exchange.done
        finally:
            if not self._exchange.done.done() or self._exchange.done.cancelled():
                self.close()
            self._exchange = None

    def close(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is None or exchange.done.done():
            return
        if exchange.status and not exchange.chunked and exchange.left is None:
            exchange.done.set_result(exchange.status)  # a body that ends with the connection
        else:
            exchange.done.set_exception(
                WireError(f"the server closed the connection mid-answer ({exc or 'no reason'})")
            )

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        exchange = self._exchange
        if exchange is None or exchange.done.done():
            return
        try:
            if exchange.status == 0:
                exchange.buffer += data
                data = _read_head(exchange)
                if exchange.status == 0:
                    return
            if exchange.chunked:
                exchange.buffer += data
                finished = _read_chunks(exchange, now)
            else:
                finished = _read_plain(exchange, data, now)
        except ValueError as error:
            exchange.done.set_exception(WireError(f"not HTTP/1.1: {error}"))
            self.close()
            return
        if finished:
            if not exchange.keep_alive:
                self.close()
            exchange.done.set_result(exchange.status)


def _read_head(exchange: _Exchange) -> bytes:
    """Parse the head once it is complete; gives what followed it."""
    end = exchange.buffer.find(b"\r\n\r\n")
    if end < 0:
        return b""
    first, *lines = bytes(exchange.buffer[:end]).decode("latin-1").split("\r\n")
    rest = bytes(exchange.buffer[end + 4 :])
    exchange.buffer.clear()
    if not first.startswith("HTTP/1."):
        raise ValueError(first[:40])
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip().lower()
        if name == "transfer-encoding":
            exchange.chunked = "chunked" in value
        elif name == "content-length":
            exchange.left = int(value)
        elif name == "connection":
            exchange.keep_alive = value != "close"
    exchange.status = int(first.split(" ", 2)[1])
    return rest


def _read_plain(exchange: _Exchange, data: bytes, now: float) -> bool:
    if data:
        exchange.on_body(data, now)
    if exchange.left is None:
        return False
    exchange.left -= len(data)
    return exchange.left <= 0


def _read_chunks(exchange: _Exchange, now: float) -> bool:
    """Hand on all complete chunks in the buffer; True after the last one."""
    buffer, pos, finished = exchange.buffer, 0, False
    while True:
        line_end = buffer.find(b"\r\n", pos)
        if line_end < 0:
            break
        size = int(buffer[pos:line_end].split(b";")[0], 16)
        stop = line_end + 2 + size
        if len(buffer) < stop + 2:
            break
        if size == 0:
            finished = True
            pos = stop + 2
            break
        exchange.on_body(bytes(buffer[line_end + 2 : stop]), now)
        pos = stop + 2
    del buffer[:pos]
    return finished
