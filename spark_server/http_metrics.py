"""Counts HTTP responses by route template, method and status class; knows nothing of their content.

A plain ASGI wrapper around the whole app, so that refusals of the middleware count too.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_server.metrics import Metrics


class HttpMetrics:
    """Calls `metrics.on_http` when a response begins."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", None)
                self._metrics.on_http(route, scope["method"], message["status"])
            await send(message)

        await self._app(scope, receive, counting)
