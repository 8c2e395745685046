"""What happens to every request before its route: request id, API key, size of the body.

Plain ASGI wrappers, since starlette's own base class hides disconnects from streaming responses.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_server.api.errors import error_response

_OPEN_PATHS = frozenset({"/health", "/ready"})
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def _header(scope: Scope, name: bytes) -> bytes | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


class RequestIdMiddleware:
    """Echoes `X-Request-Id` when it is short and harmless, else answers with one of its own.

    The client's id is echoed and nothing else: it is never a key and never logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id") or b""
        echoed = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", echoed)]
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer KEY` on every path but /health and /ready.

    The given key is compared with all accepted ones by digest, so that neither the time nor the
    first difference tells anything.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and self._digests:
            given = _header(scope, b"authorization")
            if not self._accepted(given):
                message = (
                    "no API key given; send it as 'Authorization: Bearer KEY'"
                    if given is None
                    else "the given API key is not accepted"
                )
                response = error_response(
                    message, 401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _accepted(self, header: bytes | None) -> bool:
        scheme, _, key = (header or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, accepted) for accepted in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
