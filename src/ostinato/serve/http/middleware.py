"""Middleware in front of all endpoints: it checks host, key and body, and delivers bodies to the endpoints.

Each request is logged and counted when it ends. Small bodies are read on the event loop, others in worker processes.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.errors import RequestError
from ostinato.observe.logs import log_request
from ostinato.observe.request_record import RequestRecord, ResponseCounts
from ostinato.observe.tracing import Tracing
from ostinato.serve.body_workers.context import NeedsWorker, RequestContext
from ostinato.serve.body_workers.json_complexity import check_small_body, fits_event_loop
from ostinato.serve.http.addresses import UNIX, TrustedProxies, is_loopback, split_host_port
from ostinato.serve.http.api_errors import ApiError, Dialect, as_api_error
from ostinato.serve.http.api_keys import client_of
from ostinato.serve.http.json_bodies import Body, check_type, read_body
from ostinato.serve.http.lifecycle import Lifecycle, ServerLifecycle
from ostinato.serve.http.streaming import ClientDisconnected, cancel_on_disconnect, log_failure
from ostinato.serve.http.unknown_fields import HEADER

log = logging.getLogger("ostinato.serve")

Endpoint = Callable[[Any, Request], Awaitable[Response]]


class ApiRouter(APIRouter):
    """Router of endpoints that speak one dialect, and are all public or all behind a key.

    A dialect other than OpenAI's needs a `prefix`: paths below it that are not served get their error in that dialect.
    """

    def __init__(self, prefix: str = "", *, dialect: Dialect = "openai", is_public: bool = False) -> None:
        assert prefix or dialect == "openai", "a dialect is known by the prefix"
        super().__init__(prefix=prefix)
        self.dialect: Dialect = dialect
        self.is_public = is_public


class PathRules:
    """Dialect and publicity of every path, from the routers. `public_folders` are paths of public files."""

    def __init__(self, routers: Iterable[ApiRouter], public_folders: Iterable[str] = ()) -> None:
        routers = tuple(routers)
        self._public = {getattr(route, "path", "") for router in routers if router.is_public for route in router.routes}
        self._folders = tuple(f"{folder}/" for folder in public_folders)
        self._dialects = [(router.prefix, router.dialect) for router in routers if router.dialect != "openai"]

    def is_public(self, path: str) -> bool:
        """Return whether `path` needs no key."""
        return path in self._public or path.startswith(self._folders)

    def dialect(self, path: str) -> Dialect:
        """Return the dialect of the endpoint at `path`; OpenAI's for paths that belong to no router."""
        for prefix, dialect in self._dialects:
            if path == prefix or path.startswith(f"{prefix}/"):
                return dialect
        return "openai"


class JsonPostMiddleware:
    """ASGI middleware that takes POST requests with a JSON body to their endpoints; all others pass to `app`.

    The framework keeps the same routes to describe them in the OpenAPI document. It does not run them: a stream would
    pass all of its layers with every piece.
    """

    def __init__(
        self,
        app: ASGIApp,
        routers: Iterable[ApiRouter],
        lifecycle: Lifecycle,
        request_context: Callable[[], RequestContext],
    ) -> None:
        """Register the endpoints of `routers`, each an `async def endpoint(body, request) -> Response`.

        Its body is a Body. It receives the rest of the body (`Body.without_prepared_fields`), and in
        `request.state.prepared` the result of `Body.prepare` with `request_context()`, which raises ApiError while
        there is no model.
        """
        self._app, self._lifecycle, self._request_context = app, lifecycle, request_context
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
        sent = (await receive())["body"]  # the whole body: RequestMiddleware has read it
        request = Request(scope, receive)
        try:
            check_type(Headers(scope=scope), sent, from_curl=scope["state"]["dialect"] == "ollama")
            response = await self.answer(scope["path"], sent, request)
        except (ApiError, RequestError) as error:
            response = as_api_error(error).response(scope["state"]["dialect"])
        await response(scope, receive, send)

    async def answer(self, path: str, sent: bytes, request: Request) -> Response:
        """Return the answer of the endpoint at `path` to a body. ApiError or RequestError if the body is wrong."""
        kind, endpoint = self._endpoints[path]
        body, request.state.prepared = await self._read(kind, sent, request)
        if not body.ignored_fields or self._lifecycle.settings.unknown_fields != "warn":
            return await endpoint(body, request)
        names = ", ".join(body.ignored_fields)[:_MAX_HEADER]
        log.warning("request %s: unknown fields are ignored: %s", request.state.request_id, names)
        response = await endpoint(body, request)
        response.headers[HEADER] = names
        return response

    async def _read(self, kind: type[Body], sent: bytes, request: Request) -> tuple[Body, object]:
        context = self._request_context()
        if fits_event_loop(sent):
            check_small_body(sent, context.settings)
            try:
                return read_body(kind, sent, context, context.settings.unknown_fields)
            except NeedsWorker:
                pass
        if kind.generates:
            self._lifecycle.engine.queue_limit.check(1, request.state.client)  # before anything is done for nothing
        return await cancel_on_disconnect(request, self._lifecycle.workers.read(request.state.client, kind, sent))


_MAX_HEADER = 1000
"""Characters of the names of ignored fields in the header and the log."""
CLIENT_GONE = 499
"""The status, in log and metrics, of a request whose client left before the answer."""
BODY_SECONDS = 60.0
"""Seconds that a body may take to arrive."""


class RequestMiddleware:
    """ASGI middleware around the whole application.

    It gives each request an id, a `RequestRecord` and the dialect of its path (all in `request.state`; the id is also
    the answer's header `x-request-id`), checks host and key, reads the body, and answers errors that nothing inside
    has answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: ServerLifecycle,
        counts: ResponseCounts,
        rules: PathRules,
        tracing: Tracing | None = None,
    ) -> None:
        self._app, self._counts, self._rules = app, counts, rules
        settings = lifecycle.settings
        self._keys = lifecycle.keys
        # Web pages can call a loopback address by their own names, but no Unix socket.
        self._is_private = settings.uds is None and settings.is_local and not settings.keys
        self._root_path = settings.root_path
        self._proxies = lifecycle.proxies
        self._max_body = settings.max_body
        self._tracing = tracing
        self._has_cors = bool(settings.cors_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            _strip_root_path(self._root_path, scope)
        record = RequestRecord(f"{random.getrandbits(128):032x}", scope["method"], _printable(scope))
        if self._proxies:
            _name_client(self._proxies, scope)
        record.client = scope["client"][0] if scope.get("client") else UNIX
        dialect = self._rules.dialect(scope["path"])
        scope.setdefault("state", {}).update(request_id=record.request_id, record=record, dialect=dialect)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                answer_headers = MutableHeaders(scope=message)
                answer_headers["x-request-id"] = record.request_id
                if dialect == "anthropic":
                    answer_headers["request-id"] = record.request_id
            elif record.method != "HEAD":
                record.sent_bytes += len(message.get("body", b""))
            await send(message)

        headers = Headers(scope=scope)
        try:
            await self._pass(scope, headers, receive, send_noted)
        except (ClientDisconnected, ClientDisconnect):
            record.status = CLIENT_GONE
        except Exception as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                log_failure(record.request_id, error)
            # An answer that has begun cannot be replaced: it stays incomplete.
            if record.status is None:
                await answer.response(dialect)(scope, receive, send_noted)
        finally:
            record.end()
            log_request(record)
            self._counts.count(record.method, scope["path"], record.status)
            self._counts.count_client(record)
            if self._tracing is not None:
                self._tracing.trace(record, headers)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if self._is_private:
            reject_foreign_host(headers.get("host"))
        record: RequestRecord = scope["state"]["record"]
        if not self._has_cors and record.method == "OPTIONS" and "access-control-request-method" in headers:
            raise _no_cors(headers.get("origin", ""))
        if record.method == "HEAD":  # the connection leaves out the body
            scope = {**scope, "method": "GET"}
        if not self._rules.is_public(scope["path"]):
            record.key = self._keys.check(headers.get("authorization"), headers.get("x-api-key"))
        weight = self._keys.weights.get(record.key or "", 1)
        scope["state"]["client"] = client_of(record.key, (scope.get("client") or [None])[0], weight)
        messages = [await _read_body(headers, receive, self._max_body)]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)


def _name_client(proxies: TrustedProxies, scope: Scope) -> None:
    """Set the scope's client to the one that trusted proxies name."""
    peer = scope["client"][0] if scope.get("client") else None
    client = proxies.client(peer, scope["headers"])
    if client is not None and client != peer:
        scope["client"] = client, 0


def _strip_root_path(root_path: str, scope: Scope) -> None:
    """Remove the prefix from the path, so that the layers behind know one path only."""
    path, raw = scope["path"], root_path.encode()
    if path.startswith(f"{root_path}/"):
        scope["path"] = path[len(root_path) :]
        if scope.get("raw_path", b"").startswith(raw + b"/"):
            scope["raw_path"] = scope["raw_path"][len(raw) :]


def reject_foreign_host(host: str | None) -> None:
    """Raise ApiError 421 unless the host is a name of this machine.

    It is for servers on a loopback address, without keys. A web page can make its own host name point at this machine,
    and so read what only local users may. The browser then sends that name as the host. A client that sends no host is
    not a browser.
    """
    name, _ = split_host_port(host or "localhost")
    if not is_loopback(name):
        message = (
            "this server is for its own machine, as localhost or 127.0.0.1, and was called by another name, "
            f"{name[:80]!r}; to serve others, or by a proxy that passes names on, start it with an api_key"
        )
        raise ApiError(421, message, code="foreign_host")


def _no_cors(origin: str) -> ApiError:
    """Return the error for a browser that asks whether a web page of another origin may use the server."""
    example = origin[:200] if re.fullmatch(r"https?://[\w.:\[\]-]+", origin, re.ASCII) else "https://example.org"
    message = f"web pages of other origins may not use this server; start it with --cors-origin {example} to let them"
    return ApiError(403, message, code="cors_origin")


async def _read_body(headers: Headers, receive: Receive, limit: int) -> Message:
    """Return the whole body, as one message.

    Raises ApiError for a body that has more than `limit` bytes or takes too long to arrive; ClientDisconnect if it ends
    early.
    """
    declared = headers.get("content-length", "0")
    if declared.isdecimal():
        check_size(int(declared) if len(declared) <= 18 else limit + 1, limit)
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part = message.get("body", b"")
                received += len(part)
                check_size(received, limit)
                parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds", code="body_timeout") from None
    return {"type": "http.request", "body": b"".join(parts), "more_body": False}


def check_size(size: int, limit: int) -> None:
    """Raise ApiError for a body of more bytes than `limit`."""
    if size > limit:
        raise ApiError(413, f"the body is larger than {limit} bytes (max_body)", code="body_too_large")


def _printable(scope: Scope) -> str:
    """Return the path as it was sent, in printable characters, without the query."""
    path = scope.get("raw_path") or scope["path"].encode()
    return "".join(chr(byte) if 32 < byte < 127 else f"%{byte:02X}" for byte in path[:200])
