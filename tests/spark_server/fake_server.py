"""`serve` with the fake core, run as a program by the tests of the server.

The app is a page of routes of its own, or with FAKE_APP=openai the real one.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.errors import ConfigError, EngineUnavailableError, ModelFormatError
from engine.request import GenerationRequest, SamplingParams
from spark_server.engine_api import Endpoint, EngineState, Outcome
from spark_server.server import AppParts, openai_app, serve


def make_app(parts: AppParts) -> Starlette:
    ids = itertools.count(1)

    async def ready(request: Request) -> Response:
        state = parts.client.state()
        return PlainTextResponse(state.value, 200 if state is EngineState.READY else 503)

    async def stream(request: Request) -> Response:
        count = int(request.path_params["count"])
        key = next(ids)
        wanted = GenerationRequest(key, (key,), SamplingParams(max_tokens=count))
        deltas = parts.client.generate(wanted)
        try:
            first = await anext(deltas)
        except EngineUnavailableError as error:
            return PlainTextResponse(str(error), 503)
        parts.metrics.on_start(key, Endpoint.COMPLETIONS, streaming=True)

        async def lines() -> AsyncIterator[str]:
            outcome, tokens = Outcome.ABORT, 1
            try:
                yield f"{first.token_ids[0]}\n"
                async for delta in deltas:
                    if delta.error:
                        outcome = Outcome.ERROR
                        yield f"error {delta.error}\n"
                    else:
                        tokens += 1
                        yield f"{delta.token_ids[0]}\n"
                        if delta.finish_reason:
                            outcome = Outcome.LENGTH
            finally:
                await deltas.aclose()
                parts.metrics.on_finish(key, outcome, 1, tokens, 0.1, None)

        return StreamingResponse(lines())

    async def settings(request: Request) -> Response:
        return JSONResponse(parts.settings.model_dump(mode="json") | {"keys": len(parts.keys)})

    async def metrics(request: Request) -> Response:
        page, content_type = parts.metrics.render(request.headers.get("accept", ""))
        return Response(page, media_type=content_type)

    return Starlette(
        routes=[
            Route("/ready", ready),
            Route("/stream/{count}", stream),
            Route("/settings", settings),
            Route("/metrics", metrics),
        ]
    )


if __name__ == "__main__":
    app = openai_app if os.environ.get("FAKE_APP") == "openai" else make_app
    try:
        sys.exit(serve(sys.argv[1:], factory="tests.spark_server.fake_core:build", make_app=app))
    except (ConfigError, ModelFormatError) as error:
        sys.exit(f"error: {error}")
