"""The short way of a request for generated text: past the framework's layers, of which a stream passes each with every
piece."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.errors import RequestError
from ostinato.serve.http.errors import ApiError, as_api_error
from ostinato.serve.http.intake import replayed
from ostinato.serve.protocol.common import Body

Endpoint = Callable[[Any, Request], Awaitable[Response]]


class Straight:
    """ASGI middleware within the gate: takes right bodies to the endpoints of `routers` itself. All else goes on to
    `app`, which has the same endpoints: other paths, and every wrong body, of which the framework says what is wrong.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        """Each endpoint is `async def endpoint(body, request) -> Response`, its body a Body."""
        self._app = app
        self._endpoints: dict[str, tuple[type[Body], Endpoint]] = {}
        for router in routers:
            for route in router.routes:
                assert isinstance(route, APIRoute), "an endpoint"
                assert route.methods == {"POST"}, "one that takes a body"
                kind = inspect.signature(route.endpoint, eval_str=True).parameters["body"].annotation
                self._endpoints[route.path] = kind, route.endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if known is None:
            await self._app(scope, receive, send)
            return
        kind, endpoint = known
        sent = (await receive())["body"]  # all of it: the gate has read it
        body = _read(kind, Headers(scope=scope).get("content-type", ""), sent)
        if body is None:
            await self._app(scope, replayed(sent, receive), send)
            return
        try:
            response = await endpoint(body, Request(scope, receive))
        except (ApiError, RequestError) as error:
            response = as_api_error(error).response()
        await response(scope, receive, send)


def _read(kind: type[Body], content_type: str, sent: bytes) -> Body | None:
    """The body, if it is one."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return None
    try:
        return kind.model_validate(json.loads(sent))
    except (ValueError, RecursionError, ValidationError):
        return None
