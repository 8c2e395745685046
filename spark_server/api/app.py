"""Puts the HTTP API together from what it is given. Starts nothing and reads no settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from spark_server.api import chat, completions, info
from spark_server.api.errors import install_handlers
from spark_server.api.middleware import ApiKeyMiddleware, RequestIdMiddleware
from spark_server.api.options import ApiOptions
from spark_server.api.service import Service
from spark_server.engine_api import EngineClient, MetricsPage, RequestObserver
from spark_server.text.model import TextModel
from spark_server.version import version


def create_app(
    engine: EngineClient,
    text: TextModel,
    options: ApiOptions,
    observer: RequestObserver,
    metrics_page: MetricsPage,
) -> FastAPI:
    """The API over an engine.

    Args:
        engine: where sequences are generated; need not be ready yet.
        text: tokenizer and chat template of the same model, see `load_text_model`.
        observer: is told about every generating request.
        metrics_page: renders /metrics.
    """
    service = Service(engine, text, options, observer, metrics_page)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="Spark", version=version(), redirect_slashes=False, lifespan=lifespan)
    app.state.service = service
    for part in (chat, completions, info):
        app.include_router(part.router)
    install_handlers(app)
    # Added last is outermost: a refused key still gets its request id back.
    app.add_middleware(ApiKeyMiddleware, keys=options.api_keys)
    app.add_middleware(RequestIdMiddleware)
    return app
