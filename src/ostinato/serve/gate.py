"""What every request passes before it is read: its id, its key, and the size of its body."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.serve.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics"})
"""What is answered without a key, besides the page's own files."""
PAGE = "/page/"


class Gate:
    """ASGI middleware. Puts `request_id` into the scope's state and the response's header `x-request-id`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_body: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        headers = Headers(scope=scope)
        try:
            if self._keys and not _is_open(scope["path"]):
                self._check_key(headers.get("authorization"))
            await self._app(scope, self._bounded(headers, receive), send_with_id)
        except ApiError as error:  # raised before or while the body was read: nothing was answered yet
            await error.response()(scope, receive, send_with_id)

    def _check_key(self, authorization: str | None) -> None:
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""
        # Every key is compared, each in constant time.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if not any(matches):
            message = "the Authorization header should be 'Bearer' and one of the server's keys"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _bounded(self, headers: Headers, receive: Receive) -> Receive:
        """`receive` that ends the request when its body is too large."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_body:
            raise _too_large(self._max_body)
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message: dict[str, Any] = dict(await receive())
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise _too_large(self._max_body)
            return message

        return bounded


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (max_body)", code="body_too_large")
