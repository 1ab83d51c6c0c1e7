"""The application: all endpoints, behind the middleware that every request passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from ostinato._version import __version__
from ostinato.errors import ConfigError
from ostinato.observe.request_record import ResponseCounts
from ostinato.observe.tracing import Tracing, make_tracing
from ostinato.serve.api.anthropic_messages import messages_router
from ostinato.serve.api.chat_completions import chat_router
from ostinato.serve.api.completions import completions_router
from ostinato.serve.api.embeddings import embeddings_router
from ostinato.serve.api.generation_run import ServedModel, model_of
from ostinato.serve.api.kv_events import kv_events_router
from ostinato.serve.api.ollama import PREFIX as OLLAMA
from ostinato.serve.api.ollama import ollama_reports_router, ollama_router
from ostinato.serve.api.openapi_page import DOCUMENT, openapi_routers
from ostinato.serve.api.openapi_page import PATH as DOCS
from ostinato.serve.api.page import FOLDER, page_files, page_router
from ostinato.serve.api.responses import responses_router
from ostinato.serve.api.service import observation_router, public_router, service_router
from ostinato.serve.api.tokenize import tokens_router
from ostinato.serve.http.api_errors import MODEL_ERRORS, REPORT_ERRORS, ApiError, as_api_error
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter, JsonPostMiddleware, PathRules, RequestMiddleware
from ostinato.serve.http.unknown_fields import HEADER
from ostinato.serve.other_paths import advice_on_path
from ostinato.serve.settings import ServeSettings

ROUTERS = (chat_router, completions_router, responses_router, messages_router, embeddings_router, ollama_router)
"""Routers of the endpoints that compute."""


def make_app(lifecycle: Lifecycle, tracing: Tracing | None = None) -> ASGIApp:
    """Return the server's application, which starts and stops with `lifecycle`.

    `tracing` takes the place of the settings' tracing. ConfigError if the settings ask for tracing that is not
    installed, or for a root_path that is an endpoint's.
    """
    settings, counts = lifecycle.settings, ResponseCounts()
    if tracing is None and settings.otlp_endpoint is not None:
        tracing = make_tracing(settings.otlp_endpoint, lifecycle.model_name)
    api = make_api(lifecycle, counts, tracing)
    endpoints = JsonPostMiddleware(api.app, api.with_bodies, lifecycle, lambda: api.served_model().context)
    middleware = RequestMiddleware(endpoints, lifecycle, counts, api.rules, tracing)
    if not settings.cors_origin:
        return middleware
    # Outside it: a browser's preflight request comes without a key.
    return _CORSMiddleware(
        middleware,
        allow_origins=settings.cors_origin,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", HEADER],
    )


class _CORSMiddleware(CORSMiddleware):
    """Starlette's middleware, whose refusals are errors in the API's form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        allowed = f"--cors-origin has {' and '.join(self.allow_origins)}, for {' and '.join(self.allow_methods)}"
        message = f"{bytes(response.body).decode()}: {allowed}"
        return ApiError(response.status_code, message, code="cors_origin", headers=kept).response()


class Api(NamedTuple):
    """The application with all endpoints, and what the middleware around it needs."""

    app: FastAPI
    with_bodies: Sequence[ApiRouter]
    """Routers of the endpoints that take a body, which `JsonPostMiddleware` runs."""
    served_model: Callable[[], ServedModel]
    """Function that returns the model, which is there once the engine is."""
    rules: PathRules


def make_api(lifecycle: Lifecycle, counts: ResponseCounts, tracing: Tracing | None = None) -> Api:
    """Return the application with all endpoints, without the middleware in front of it."""
    served_model_of = lru_cache(maxsize=1)(
        partial(
            model_of,
            settings=lifecycle.settings.without_keys(),
            model_name=lifecycle.model_name,
            workers=lambda: lifecycle.workers,
        )
    )
    lifecycle.before_requests = served_model_of

    def served_model() -> ServedModel:
        return served_model_of(lifecycle.engine)

    with_bodies = [router(lifecycle, served_model) for router in ROUTERS]
    with_bodies.append(tokens_router())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        yield
        await lifecycle.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.end)

    app = FastAPI(
        title="Ostinato",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # one of ours does not occupy the event loop
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        servers=[{"url": lifecycle.settings.root_path}] if lifecycle.settings.root_path else None,
    )
    reports = [
        public_router(lifecycle, counts),
        service_router(lifecycle, served_model),
        observation_router(lifecycle),
        kv_events_router(lifecycle),
        ollama_reports_router(lifecycle, served_model),
    ]
    pages = [page_router(lifecycle.settings.root_path), *openapi_routers(app.openapi)]
    for router in with_bodies:
        app.include_router(router, responses=MODEL_ERRORS)
    for router in reports:
        app.include_router(router, responses=REPORT_ERRORS)
    for router in pages:
        app.include_router(router)
    app.mount(FOLDER, page_files())

    _check_root_path(lifecycle.settings.root_path, [DOCUMENT, DOCS, *_paths(*reports, *with_bodies), FOLDER])
    _name_endpoints(counts, app.routes)
    routers = (*pages, *reports, *with_bodies)
    for router in routers:
        _name_endpoints(counts, router.routes)

    @app.exception_handler(ApiError)
    @app.exception_handler(Exception)  # RequestMiddleware gets the error too, and logs it
    async def failed(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.state.dialect)

    served = {method: list(_paths(*with_bodies, *pages, *reports, method=method)) for method in ("GET", "POST")}

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        path, message, headers = request.scope["path"], str(error.detail), error.headers
        if error.status_code == 404:
            message = _no_such_path(request, served, lifecycle.settings)
        elif error.status_code == 405 and headers is not None and "Allow" in headers:
            message = f"{path} is asked with {headers['Allow']}, not {request.state.record.method}"
        return ApiError(error.status_code, message, headers=headers).response(request.state.dialect)

    return Api(app, with_bodies, served_model, PathRules(routers, (FOLDER,)))


def _no_such_path(request: Request, served: Mapping[str, Sequence[str]], settings: ServeSettings) -> str:
    """Return the message for a path that is not served; `served` has the paths of each method."""
    path, method = request.scope["path"], request.method
    if request.state.dialect == "ollama":
        url = f"{request.url.scheme}://{request.url.netloc}{settings.root_path}/v1"
        theirs = [each for method in ("POST", "GET") for each in served[method] if each.startswith(f"{OLLAMA}/")]
        theirs = list(dict.fromkeys([*get_close_matches(path, theirs, 1, 0.8), *theirs]))
        return (
            f"{path} is not served; of Ollama's API there are {', '.join(theirs)}: one model is served, and neither "
            f"pulled nor made here. For clients of OpenAI's the base_url is {url}"
        )
    if (here := advice_on_path(path)) is not None:
        return f"there is no {path} here; in its place: {here}"
    reports = f"GET is for {', '.join(served['GET'])}; " if method == "GET" else ""
    paths = [*served["POST"], *(served["GET"] if reports else ())]
    near = get_close_matches(path, paths, 1, 0.75)
    meant = f"did you mean {near[0]}? " if near else ""
    there_are = f"{reports}requests go to {', '.join(served['POST'])}, and {DOCUMENT} describes all"
    return f"there is no {path} here; {meant}{there_are[0].upper() if near else there_are[0]}{there_are[1:]}"


def _paths(*routers: ApiRouter, method: str | None = None) -> Iterator[str]:
    """Yield the paths of all routes, or of those of one method."""
    for router in routers:
        for route in router.routes:
            if isinstance(route, Route) and (method is None or method in (route.methods or ())):
                yield route.path.replace(":path", "")


def _check_root_path(root_path: str, paths: Iterable[str]) -> None:
    """Raise ConfigError if `root_path` is a prefix of an endpoint, since endpoints answer without it too."""
    if root_path and any(path == root_path or path.startswith(f"{root_path}/") for path in paths):
        raise ConfigError(f"root_path {root_path} is where endpoints are without it; choose another, such as /llm")


def _name_endpoints(counts: ResponseCounts, routes: Iterable[BaseRoute]) -> None:
    """Register the known paths in `counts`. Paths with a variable part, and files, share a name."""
    for route in routes:
        if isinstance(route, Mount):
            counts.families[f"{route.path}/"] = route.path
        elif isinstance(route, Route):
            begin, has_variable, _ = route.path.partition("{")
            if has_variable:
                counts.families[begin] = route.path.replace(":path", "")
            else:
                counts.paths.add(route.path)
