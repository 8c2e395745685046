"""Sends an answer, streamed or whole, and gives everything up when the client goes away.

Knows nothing of what it sends. Written on ASGI itself, so that the client's leaving is noticed in
every state, also before the first byte. CPU of the whole server process per event, 128 streams at
3,800 tokens/s on 2 cores: 44 us here (20 of them the socket's send), 46 with starlette's
StreamingResponse, 70 with sse-starlette.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spark_server.api.errors import describe, envelope
from spark_server.api.formats import DONE, Collected, Format, event, usage
from spark_server.api.generation import ChoiceDelta, ChoiceRun, Start, run_all

_log = logging.getLogger(__name__)

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GenerationResponse(Response):
    """Runs the choices of a request and writes their answer.

    Nothing is sent before the first delta came, so that a refusal by the engine is a plain HTTP
    error. After that an error is an event, and the stream ends without `[DONE]`.

    Args:
        prompt_tokens: sum over prompts.
        include_usage: end a stream with an event of token counts.
    """

    def __init__(
        self,
        runs: Sequence[ChoiceRun],
        start: Start,
        form: Format,
        *,
        prompt_tokens: int,
        stream: bool,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._runs = runs
        self._start = start
        self._form = form
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send(scope, receive, send))
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            work.cancel()
            await asyncio.gather(work, left, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(run_all(self._runs, self._start)) as deltas:
            if self._stream:
                await self._send_stream(deltas, send)
                return
            collected = [Collected() for _ in self._runs]
            async for delta in deltas:
                collected[delta.index].add(delta)
        data = self._form.body(collected, self._runs, usage(self._runs, self._prompt_tokens))
        await Response(data, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, deltas: AsyncGenerator[ChoiceDelta, None], send: Send) -> None:
        delta: ChoiceDelta | None = await anext(deltas)
        data = b"".join(self._form.opening(run.index) for run in self._runs)
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        unended = len(self._runs)
        try:
            while delta is not None:
                data += self._events(delta)
                unended -= delta.finish is not None
                # The last one goes with the end of the stream: every packet wakes the client up.
                if unended and data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = b""
                delta = await anext(deltas, None)
        except Exception as error:
            message, status, param, code = describe(error)
            if code == "internal_error":
                _log.error("unexpected error in a stream", exc_info=error)
            data += event(envelope(message, status, param=param, code=code))
        else:
            if self._include_usage:
                data += self._form.usage_event(usage(self._runs, self._prompt_tokens))
            data += DONE
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _events(self, delta: ChoiceDelta) -> bytes:
        return self._form.events(delta, self._runs[delta.index])
