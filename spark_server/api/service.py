"""What the routes share: the engine, the text model, options, and the checks every request passes.

Knows no route.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from fastapi import Request

from engine.errors import EngineUnavailableError, RequestError
from spark_server.api.generation import Start, run_choice
from spark_server.api.options import ApiOptions
from spark_server.api.schemas import SamplingBody
from spark_server.engine_api import (
    Endpoint,
    EngineClient,
    EngineState,
    MetricsPage,
    ModelInfo,
    Outcome,
    RequestObserver,
)
from spark_server.text.model import TextModel

_T = TypeVar("_T")

_UNAVAILABLE = {
    EngineState.LOADING: "the model is being loaded; try again in a moment",
    EngineState.DRAINING: "the server is shutting down and takes no new requests",
    EngineState.DEAD: "the engine is not running",
    EngineState.STUCK: "the engine makes no progress",
}


class Service:
    """The parts of a running API, in one object that the routes get."""

    def __init__(
        self,
        engine: EngineClient,
        text: TextModel,
        options: ApiOptions,
        observer: RequestObserver,
        metrics_page: MetricsPage,
    ) -> None:
        self.engine = engine
        self.text = text
        self.options = options
        self.observer = observer
        self.metrics_page = metrics_page
        self._pool = ThreadPoolExecutor(options.text_threads, thread_name_prefix="spark-text")
        self._ids = itertools.count(1)

    def close(self) -> None:
        """End the text threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def new_id(self) -> int:
        """A request id, unique in the life of this server."""
        return next(self._ids)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run text work beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def model_names(self, info: ModelInfo) -> tuple[str, ...]:
        """All names that `model` may have, the model's own first."""
        return tuple(dict.fromkeys((info.model_id, *self.options.served_names)))

    def loaded(self) -> ModelInfo:
        """The model, also while the engine does not take requests.

        Raises:
            EngineUnavailableError: none was loaded yet.
        """
        info = self.engine.info()
        if info is None:
            raise EngineUnavailableError(_UNAVAILABLE[EngineState.LOADING])
        return info

    def ready(self, model: str | None) -> tuple[ModelInfo, str]:
        """The model and the name it was asked for by; no name means the model's own.

        Raises:
            EngineUnavailableError: the engine does not take requests.
            RequestError: 404, there is no model of this name.
        """
        state = self.engine.state()
        if state is not EngineState.READY:
            raise EngineUnavailableError(_UNAVAILABLE[state])
        info = self.loaded()
        if model is not None and model not in self.model_names(info):
            raise unknown_model(model)
        return info, model or info.model_id

    def starter(self, endpoint: Endpoint, streaming: bool) -> Start:
        """What starts one choice of a request."""
        return lambda run: run_choice(run, self.engine, self.observer, endpoint, streaming)

    def refused(
        self, endpoint: Endpoint, data: dict[str, Any], began: float, error: Exception
    ) -> None:
        """Account for a request that ended before it had sequences."""
        key = self.new_id()
        outcome = (
            Outcome.UNAVAILABLE if isinstance(error, EngineUnavailableError) else Outcome.REJECTED
        )
        self.observer.on_start(key, endpoint, data.get("stream") is True)
        self.observer.on_finish(key, outcome, 0, 0, time.monotonic() - began, None)


def service_of(request: Request) -> Service:
    """The service of the app that a request came to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def unknown_model(model: str) -> RequestError:
    """The error for a model that is not served."""
    return RequestError(
        f"the model {model[:128]!r} is not served here; GET /v1/models lists what is",
        param="model",
        code="model_not_found",
        status=404,
    )


def refuse(message: str, param: str) -> NoReturn:
    """Raise a 400 that names a field."""
    raise RequestError(f"{param}: {message}", param=param, code="invalid_value")


def choice_count(body: SamplingBody, prompts: int, options: ApiOptions) -> int:
    """Choices of each prompt.

    Raises:
        RequestError: all prompts' choices together are too many.
    """
    n = body.n or 1
    if n * prompts > options.max_choices:
        param = "n" if prompts == 1 else "prompt"
        refuse(
            f"{prompts} x {n} choices asked for, at most {options.max_choices} are accepted", param
        )
    return n


def wants_usage(body: SamplingBody) -> bool:
    """Whether a stream ends with its token counts.

    Raises:
        RequestError: stream options without a stream, or one that is not supported.
    """
    if body.stream_options is None:
        return False
    if not body.stream:
        refuse("is only allowed together with stream", "stream_options")
    if body.stream_options.include_obfuscation:
        refuse("is not supported by this server", "stream_options.include_obfuscation")
    return bool(body.stream_options.include_usage)


def template_kwargs(value: object, reserved: frozenset[str]) -> dict[str, Any]:
    """The request's variables for the chat template.

    Raises:
        RequestError: not an object, or it sets a reserved name.
    """
    param = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("must be an object", param)
    for name in value:
        if name in reserved or name.startswith("_"):
            refuse(f"the name {name[:64]!r} is reserved", param)
    return value
