"""One envelope for every error: `{"error": {"message", "type", "param", "code"}}`.

Knows which exception means which status; raises nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.errors import EngineUnavailableError, QueueFullError, RequestError

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 2


class EngineFailureError(Exception):
    """The engine took a request and then failed it; `status` fits the failure."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def error_type(status: int) -> str:
    """OpenAI's `type` of an error with this HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def envelope(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The JSON text of an error."""
    error = {"message": message, "type": error_type(status), "param": param, "code": code}
    # A lone surrogate from a client's text must not break the reply about it.
    error["message"] = message.encode("utf-8", "replace").decode()
    return msgspec.json.encode({"error": error})


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error as a whole response."""
    return Response(
        envelope(message, status, param=param, code=code),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def describe(error: BaseException) -> tuple[str, int, str | None, str | None]:
    """Message, status, param and code that the client sees for an exception."""
    if isinstance(error, RequestError):
        return error.message, error.status, error.param, error.code
    if isinstance(error, EngineUnavailableError):
        return str(error), 503, None, "engine_unavailable"
    if isinstance(error, EngineFailureError):
        return error.message, error.status, None, "engine_error"
    return "an internal error occurred; the server's log says more", 500, None, "internal_error"


def to_response(error: BaseException) -> Response:
    """The response that fits an exception."""
    message, status, param, code = describe(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after)
    elif status == 503:
        headers["Retry-After"] = str(_RETRY_SECONDS)
    return error_response(message, status, param=param, code=code, headers=headers)


_HTTP_TEXTS = {
    404: ("this server has no such path: {method} {path}", "not_found"),
    405: ("{path} does not take the method {method}", "method_not_allowed"),
}


def install_handlers(app: FastAPI) -> None:
    """Make the app answer every error in the envelope."""

    async def known(request: Request, error: Exception) -> Response:
        return to_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text, code = _HTTP_TEXTS.get(error.status_code, ("{detail}", "http_error"))
        message = text.format(
            method=request.method[:32], path=request.url.path[:256], detail=error.detail
        )
        return error_response(message, error.status_code, code=code, headers=error.headers)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(f"{name}: {first['msg']}", 400, param=name, code="invalid_value")

    async def gone(request: Request, error: Exception) -> Response:
        return error_response("the client left before its body was read", 400)

    async def unknown(request: Request, error: Exception) -> Response:
        _log.error("unexpected error in %s", request.url.path, exc_info=error)
        return to_response(error)

    for kind in (RequestError, EngineUnavailableError, EngineFailureError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unknown)
