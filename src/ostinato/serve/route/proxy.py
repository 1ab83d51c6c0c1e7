"""The router's application: it passes each request on to the backend that computes it soonest.

A request is sent again to another backend only if nothing of an answer has come. A client that leaves ends its request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import get_args
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.core import Metric
from starlette.types import ASGIApp

from ostinato._version import __version__
from ostinato.engine.process.engine_messages import SubmitRequest
from ostinato.errors import ConfigError
from ostinato.observe.metrics import CONTENT_TYPE_LATEST, LabelledValues, family, render_metrics
from ostinato.observe.request_record import ResponseCounts
from ostinato.observe.server_metrics import answers, connections, loop_delay, refusals
from ostinato.plan.plan import Plan
from ostinato.replicas.router import RoutingPolicy
from ostinato.serve.api.ollama import PREFIX as OLLAMA
from ostinato.serve.http.api_errors import ApiError, as_api_error
from ostinato.serve.http.lifecycle import ServerLifecycle
from ostinato.serve.http.middleware import ApiRouter, PathRules, RequestMiddleware
from ostinato.serve.http.streaming import EVENTS, JSON_LINES, ChunkedJson, EventStream, cancel_on_disconnect
from ostinato.serve.route.backends import Backend, BackendPool, BackendState
from ostinato.serve.route.exchange import Exchange
from ostinato.serve.route.ext_proc import ExtProcServer, check_ext_proc
from ostinato.serve.route.prompts import BODIES, PromptReader
from ostinato.serve.route.upstream import (
    HOP_BY_HOP,
    BackendAddress,
    HeaderList,
    OutOfResources,
    Unreachable,
    UpstreamError,
    UpstreamReply,
    open_reply,
)
from ostinato.serve.settings import ServeSettings

log = logging.getLogger("ostinato.serve")

OTHERS = (
    "/v1/embeddings", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/api/embed", "/api/embeddings",
    "/api/show",
)  # fmt: skip
"""Endpoints that take a body and have no prompt that the prefix cache knows."""
REPORTS = ("/v1/models", "/tokenizer_info", "/api/tags", "/api/ps", "/api/version")
"""Endpoints without a body that are passed on."""
MAX_BROKEN = 2
"""Backends that may break off before their answer begins; a request that ends servers does not end all of them."""
SLACK = 30.0
"""Seconds beyond `request_timeout` for which the router waits for an answer to begin."""
_KEY_HEADERS = (b"authorization", b"x-api-key")


@dataclass
class RouteSettings:
    """Settings of the router besides those of its HTTP server."""

    backends: tuple[str, ...]
    """URLs of the servers."""
    model: str | None = None
    """Checkpoint with the tokenizer; that of the backends' plan if it is left out."""
    backend_key: str | None = None
    """Key for the backends, in place of the clients' own."""
    routing: RoutingPolicy = "prefix"
    ext_proc: str | None = None
    """Address on which Envoy's external processing is served."""


class RouteLifecycle(ServerLifecycle):
    """Lifecycle of a router: ready while a backend is."""

    descriptors_per_connection = 2  # the client's and the backend's

    def __init__(self, settings: ServeSettings, route: RouteSettings) -> None:
        """Make the lifecycle. ConfigError for a URL or a key that cannot be."""
        super().__init__(settings)
        key = route.backend_key
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ConfigError("backend_key has characters that a header cannot have")
        if not route.backends:
            raise ConfigError("a router needs backends: give their URLs, separated by commas")
        addresses = [BackendAddress.read(url) for url in route.backends]
        self.route = route
        self._addresses = list({(each.host, each.port, each.path): each for each in addresses}.values())
        self.reader: PromptReader | None = None
        """Reader of prompts; None until a backend is ready."""
        self._ext_proc: ExtProcServer | None = None
        if route.ext_proc is not None:
            check_ext_proc(route.ext_proc, self._addresses, settings.insecure)

    def start(self) -> None:
        """Look for backends on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.pool = BackendPool(self._addresses, self.route.routing, self.route.backend_key)
        self.pool.on_first, self.pool.on_failure = self._make_reader, self.fail
        self.loop_delay.start()
        self.pool.start()
        self.on_ready()
        if self.route.ext_proc is not None:
            self._ext_proc = ExtProcServer(self.route.ext_proc, self.pool, self)
            self._ext_proc.start()

    def _make_reader(self, plan: Plan, names: tuple[str, ...]) -> None:
        """Make the reader of prompts; it loads a tokenizer, so a thread of its own calls this."""
        self.reader = PromptReader(plan, self.route.model or plan.settings.model, names, self.settings)
        if self.starts_fork_server:
            self._loop.call_soon_threadsafe(self.reader.workers.start)

    async def read_prompt(self, path: str, sent: bytes, client: str, request_id: str) -> SubmitRequest | None:
        """Return the prompt of a request, if it has one that the choice of a backend depends on."""
        if self.reader is None or self.route.routing != "prefix":
            return None
        return await self.reader.read(path, sent, client, request_id)

    def fail(self, error: ConfigError) -> None:
        """End the router with an error."""
        self.error = error
        self.on_end()

    @property
    def status(self) -> str:
        """`starting` before any backend was ready; then `ready`, `no_backend` or `draining`."""
        if self.draining:
            return "draining"
        if self.pool.ready:
            return "ready"
        return "starting" if self.reader is None else "no_backend"

    async def drain(self) -> None:
        if self.draining:
            return
        self.draining = True
        log.info("shutting down; %d requests are unfinished", self.pool.num_running)
        until = asyncio.get_running_loop().time() + self.settings.drain_timeout
        while self.pool.num_running and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        self.on_end()

    async def stop(self) -> None:
        """Stop watching backends, and the processes that read bodies, whatever one part raises."""
        parts = [part for part in (self.loop_delay, self._ext_proc, self.pool, self.reader) if part is not None]
        for result in await asyncio.gather(*(part.stop() for part in parts), return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("a part of the router did not stop", exc_info=result)

    def exit_status(self) -> int:
        if self.error is not None:
            raise self.error
        return 0


def make_route_app(lifecycle: RouteLifecycle) -> ASGIApp:
    """Return the router's application, which starts and stops with `lifecycle`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        yield
        await lifecycle.stop()

    app = FastAPI(
        title="Ostinato's router", version=__version__, lifespan=lifespan, openapi_url=None, docs_url=None,
        redoc_url=None, redirect_slashes=False,
    )  # fmt: skip
    counts = ResponseCounts()
    public = _public_router(lifecycle, counts)
    app.include_router(public)
    proxy = RouterProxy(lifecycle)
    app.add_route("/backends", proxy.backends, ["GET"])
    app.add_route("/pick", proxy.pick, ["POST"])
    app.add_route("/{path:path}", proxy.forward, ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])

    @app.exception_handler(ApiError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.state.dialect)

    dialects = [ApiRouter("/v1/messages", dialect="anthropic"), ApiRouter(OLLAMA, dialect="ollama")]
    counts.paths.update((*BODIES, *OTHERS, *REPORTS, "/pick", "/backends", "/health", "/metrics"))
    return RequestMiddleware(app, lifecycle, counts, PathRules([public, *dialects]))


def _public_router(lifecycle: RouteLifecycle, counts: ResponseCounts) -> ApiRouter:
    router = ApiRouter(is_public=True)

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """Return 200 while a backend takes requests, else 503. The body has the status, and backends by state."""
        status, states = lifecycle.status, Counter(each.state for each in lifecycle.pool.backends.values())
        return JSONResponse({"status": status, "backends": states}, 200 if status == "ready" else 503)

    @router.get("/health/live", response_model=None)
    async def alive() -> Response:
        """Return 200: a router without backends need not be restarted."""
        return JSONResponse({"status": lifecycle.status})

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Return the counts of the router and its backends, for Prometheus. Backends have their numbers, from 0."""
        prefix, lag = lifecycle.settings.metrics_prefix, lifecycle.loop_delay
        seen = [
            *backend_metrics(lifecycle.pool, prefix),
            *connections(lifecycle.occupancy.total, lifecycle.occupancy.refused, prefix, {}),
            *loop_delay(lag.seconds, lag.num_stalls, prefix, {}),
            refusals(lifecycle.refusals.counts, prefix, {}),
            answers(counts.rows(), {}),
        ]
        return Response(render_metrics(seen), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the router's version."""
        return {"version": __version__}

    return router


class RouterProxy:
    """Endpoints of the router that need a key."""

    def __init__(self, lifecycle: RouteLifecycle) -> None:
        self._lifecycle = lifecycle

    async def backends(self, _: Request) -> Response:
        """Return the state of each backend, and how often each reason decided."""
        pool = self._lifecycle.pool
        reasons = {} if pool.placement is None else dict(pool.placement.router.reasons)
        found = [backend.to_json() for backend in pool.backends.values()]
        return JSONResponse({"status": self._lifecycle.status, "backends": found, "reasons": reasons})

    async def pick(self, request: Request) -> Response:
        """Choose a backend for a request that another proxy sends, and return URL, expected hit in tokens and reason.

        The body is that of the request, whose endpoint is in the query as `path`; `among` are the URLs to choose from,
        separated by commas.
        """
        query, pool = request.query_params, self._lifecycle.pool
        path, among = query.get("path", ""), query.get("among")
        if path not in BODIES:
            message = f"the query should have the request's endpoint as path, one of {', '.join(BODIES)}"
            raise ApiError(400, message, param="path")
        prompt = await self._prompt(request, path, await request.body())
        asked = None if among is None else {url.strip().rstrip("/") for url in among.split(",")}
        ready = [name for name in pool.ready if asked is None or name in asked]
        choice = pool.choose(request.state.request_id, prompt, ready)
        if choice is None:
            raise _no_backend(pool)
        # Nobody says when the request ends. Its prompt counts as given lately, and as cached there from now on.
        pool.note_end(request.state.request_id)
        count = None if prompt is None else len(prompt.prompt_token_ids)
        found = {"backend": choice.name, "reason": choice.reason.value, "hit": choice.hit, "prompt_tokens": count}
        return JSONResponse(found)

    async def forward(self, request: Request) -> Response:
        """Pass a request on, and its answer back."""
        path, method = request.scope["path"], request.method
        served = {"POST": (*BODIES, *OTHERS), "GET": REPORTS}.get(method, ())
        is_model = method == "GET" and path.startswith("/v1/models/") and not {".", ".."} & set(path.split("/"))
        if path not in served and not is_model:
            raise _not_passed_on(method, path)
        if self._lifecycle.draining:
            raise ApiError(503, "the router is shutting down and accepts no more requests", code="draining")
        sent, pool = await request.body(), self._lifecycle.pool
        prompt = await self._prompt(request, path, sent) if method == "POST" else None
        query = request.scope["query_string"]
        target = quote(path, safe="/:@").encode() + (b"?" + query if query else b"")
        left, num_broken = set(pool.ready), 0
        while left and num_broken < MAX_BROKEN:
            choice = pool.choose(request.state.request_id, prompt, left)
            if choice is None:
                break
            left.discard(choice.name)
            exchange = Exchange(pool, pool.backends[choice.name], request.state.request_id, choice, prompt)
            try:
                reply = await self._open(request, exchange, target, sent)
            except OutOfResources as error:
                exchange.close()
                log.warning("request %s: %s", request.state.request_id, error)
                raise _no_resources() from None
            except UpstreamError as error:
                exchange.note_failure()
                exchange.close()
                log.warning("request %s: backend %s: %s", request.state.request_id, choice.name, error)
                if isinstance(error, Unreachable):
                    pool.lose(choice.name, str(error))
                else:
                    num_broken += 1
                continue
            except BaseException:
                exchange.close()
                raise
            if reply.status != 503 or not left:
                return _answer(reply, exchange, self._seconds)
            reply.close()
            exchange.close()
        raise _no_backend(pool) if not num_broken else _broken()

    @property
    def _seconds(self) -> float:
        """Seconds for which the router waits for the next part of an answer."""
        return self._lifecycle.settings.request_timeout + SLACK

    async def _open(self, request: Request, exchange: Exchange, target: bytes, sent: bytes) -> UpstreamReply:
        """Send a request to a backend, and return its reply. A client that leaves meanwhile ends it."""
        address, headers = exchange.backend.address, self._headers(request)
        opening = open_reply(address, request.method, target, headers, sent, on_connection=exchange.note_connection)
        try:
            async with asyncio.timeout(self._seconds):
                return await cancel_on_disconnect(request, opening)
        except TimeoutError:
            exchange.note_failure()
            message = f"the server behind the router did not answer within {self._seconds:g} seconds"
            raise ApiError(504, message, code="backend_timeout") from None

    async def _prompt(self, request: Request, path: str, sent: bytes) -> SubmitRequest | None:
        reading = self._lifecycle.read_prompt(path, sent, request.state.client, request.state.request_id)
        return await cancel_on_disconnect(request, reading)

    def _headers(self, request: Request) -> HeaderList:
        """Return the client's headers for a backend, with its address, and with the router's key if it has one."""
        pool = self._lifecycle.pool
        dropped = {*HOP_BY_HOP, b"x-forwarded-for", *(_KEY_HEADERS if pool.key_headers else ())}
        # What the header Connection names is for this connection too.
        named = b",".join(value for name, value in request.scope["headers"] if name == b"connection")
        dropped |= {word.strip().lower() for word in named.split(b",")}
        headers = [each for each in request.scope["headers"] if each[0] not in dropped]
        client = request.scope.get("client")
        forwarded = [(b"x-forwarded-for", str(client[0]).encode())] if client else []
        return [*headers, *pool.key_headers, *forwarded]


def _answer(reply: UpstreamReply, exchange: Exchange, seconds: float) -> Response:
    """Return a backend's reply as the answer, which closes both at its end."""

    def close() -> None:
        reply.close()
        exchange.close()

    is_stream = reply.header(b"content-type").split(b";")[0].strip() in (EVENTS.encode(), JSON_LINES.encode())
    pieces = _pieces(reply, exchange, is_stream, seconds)
    response = EventStream(pieces, close) if is_stream else ChunkedJson(pieces, close)
    response.status_code = reply.status
    kept = [each for each in reply.headers if each[0] not in HOP_BY_HOP and each[0] != b"x-request-id"]
    # Numbers, since clients need not know the addresses.
    choice = exchange.choice
    numbers = [(b"x-ostinato-backend", b"%d" % exchange.backend.number), (b"x-ostinato-hit", b"%d" % choice.hit)]
    response.raw_headers = [*kept, *numbers, (b"x-ostinato-reason", choice.reason.value.encode())]
    return response


async def _pieces(reply: UpstreamReply, exchange: Exchange, is_stream: bool, seconds: float) -> AsyncGenerator[bytes]:
    num_events = 0
    pieces = reply.pieces()
    try:
        while True:
            async with asyncio.timeout(seconds):
                piece = await anext(pieces, None)
            if piece is None:
                break
            num_events += piece.count(b"\n\n")
            exchange.note_piece(piece)
            yield piece
    except (UpstreamError, TimeoutError) as error:
        exchange.note_failure()
        log.warning("backend %s: %s", exchange.backend.name, str(error) or f"its answer pauses for {seconds:g} s")
        raise _broken() from None  # in a stream of events, its last event; any other answer stays incomplete
    if is_stream:
        exchange.note_answer(num_events)
    exchange.note_hit()


def _no_backend(pool: BackendPool) -> ApiError:
    states = ", ".join(f"{backend.number} is {backend.state}" for backend in pool.backends.values())
    message = f"no server behind the router takes the request: {states}"
    return ApiError(503, message, code="no_backend", headers={"Retry-After": "1"})


def _no_resources() -> ApiError:
    message = "the router can open no more connections to servers; the request may be repeated"
    return ApiError(503, message, code="no_connection", headers={"Retry-After": "1"})


def _broken() -> ApiError:
    message = "the server behind the router ended its answer too early; the request may be repeated"
    return ApiError(502, message, code="backend_lost")


def _not_passed_on(method: str, path: str) -> ApiError:
    paths = ", ".join((*BODIES, *OTHERS))
    message = f"{method} {path} is not passed on; POST goes to {paths}, and GET to {', '.join(REPORTS)}, /backends"
    return ApiError(404, message)


def backend_metrics(pool: BackendPool, prefix: str) -> Iterator[Metric]:
    """Yield the metrics of all backends, whose label is their number, under names that begin with `prefix`."""
    backends = list(pool.backends.values())
    router = None if pool.placement is None else pool.placement.router

    def rows(value: Callable[[Backend], float], **labels: str) -> LabelledValues:
        return [({"backend": str(each.number), **labels}, value(each)) for each in backends]

    def counter(name: str, text: str, values: LabelledValues) -> Metric:
        return family("counter", f"{prefix}router_{name}", text, values, {})

    def gauge(name: str, text: str, values: LabelledValues) -> Metric:
        return family("gauge", f"{prefix}router_{name}", text, values, {})

    yield counter("requests", "Requests that were sent", rows(lambda each: each.counts.num_sent))
    text = "Requests without an answer, or whose answer broke off"
    yield counter("failed_requests", text, rows(lambda each: each.counts.num_failed))
    yield gauge("running_requests", "Requests that are under way", rows(lambda each: each.num_running))
    text = "Tokens of the prompts that were sent, as far as the router reads them"
    yield counter("prompt_tokens", text, rows(lambda each: each.counts.prompt_tokens))
    text = "Cached tokens of the answers whose usage says them: expected by the router, and reported"
    hits = rows(lambda each: each.counts.expected_hit_tokens, kind="expected")
    hits += rows(lambda each: each.counts.reported_hit_tokens, kind="reported")
    yield counter("hit_tokens", text, hits)
    reasons = {} if router is None else router.reasons
    chosen: LabelledValues = [({"reason": reason}, count) for reason, count in sorted(reasons.items())]
    yield counter("choices", "Choices by reason", chosen)
    text = "Messages of cache events, and those that were missed"
    events = rows(lambda each: each.counts.num_events, event="received")
    events += rows(lambda each: each.counts.num_lost_events, event="lost")
    yield counter("events", text, events)
    text = "Places at which a prompt may hit, as the backend tells"
    yield gauge("index_keys", text, rows(lambda each: 0 if router is None else router.num_known(each.name)))
    text = "1 if the backend tells what it has cached"
    yield gauge("backend_has_events", text, rows(lambda each: each.has_events))
    text = "1 for the state in which the backend is"
    states = [
        row
        for state in get_args(BackendState)
        for row in rows(lambda each: each.state == state, state=state)  # noqa: B023
    ]
    yield gauge("backend_state", text, states)
    down = sum(each.state not in ("ready", "draining") for each in backends)
    yield gauge("backends_down", "Backends that get no requests and do not drain", [({}, down)])
