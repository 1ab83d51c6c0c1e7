"""Delivery of bodies to endpoints: small ones are read on the event loop, others in worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.errors import RequestError
from ostinato.serve.http.bodies import Body, check_type, validated
from ostinato.serve.http.errors import ApiError, as_api_error
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.streaming import cancel_on_disconnect
from ostinato.serve.work.context import NeedsWorker, RequestContext
from ostinato.serve.work.shape import check_small_body, fits_event_loop

Endpoint = Callable[[Any, Request], Awaitable[Response]]


class JsonPostMiddleware:
    """ASGI middleware that takes POST requests with a JSON body to their endpoints; all others pass to `app`.

    The framework keeps the same routes to describe them in the OpenAPI document. It does not run them: a stream would
    pass all of its layers with every piece.
    """

    def __init__(
        self, app: ASGIApp, routers: Iterable[APIRouter], lifecycle: Lifecycle, work: Callable[[], RequestContext]
    ) -> None:
        """Register the endpoints of `routers`, each an `async def endpoint(body, request) -> Response`.

        Its body is a Body. It receives the rest of the body (`Body.without_prepared_fields`), and in `request.state.prepared` the result
        of `Body.prepare` with `work`, which raises ApiError while there is no model.
        """
        self._app, self._lifecycle, self._work = app, lifecycle, work
        self._endpoints: dict[str, tuple[type[Body], Endpoint]] = {}
        for router in routers:
            for route in router.routes:
                assert isinstance(route, APIRoute), "an endpoint"
                assert route.methods == {"POST"}, "one that takes a body"
                kind = inspect.signature(route.endpoint, eval_str=True).parameters["body"].annotation
                self._endpoints[route.path] = kind, route.endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._endpoints:
            await self._app(scope, receive, send)
            return
        sent = (await receive())["body"]  # the whole body: the gate has read it
        request = Request(scope, receive)
        try:
            check_type(Headers(scope=scope).get("content-type", ""), sent)
            response = await self.answer(scope["path"], sent, request)
        except (ApiError, RequestError) as error:
            response = as_api_error(error).response(scope["path"])
        await response(scope, receive, send)

    async def answer(self, path: str, sent: bytes, request: Request) -> Response:
        """Return the answer of the endpoint at `path` to a body. ApiError or RequestError if the body is wrong."""
        kind, endpoint = self._endpoints[path]
        body, request.state.prepared = await self._read(kind, sent, request)
        return await endpoint(body, request)

    async def _read(self, kind: type[Body], sent: bytes, request: Request) -> tuple[Body, Any]:
        work = self._work()
        if fits_event_loop(sent):
            check_small_body(sent, work.settings)
            try:
                body = validated(kind, sent)
                return body, body.prepare(work)
            except NeedsWorker:
                pass
        if kind.generates:
            self._lifecycle.engine.admission.check(1, request.state.client)  # before anything is done for nothing
        return await cancel_on_disconnect(request, self._lifecycle.workers.read(request.state.client, kind, sent))
