"""The application: its endpoints, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ostinato import __version__
from ostinato.errors import RequestError
from ostinato.observe.tracing import Tracing, make_tracing
from ostinato.serve.api.chat import chat_router
from ostinato.serve.api.completions import completions_router
from ostinato.serve.api.live import live_router
from ostinato.serve.api.metrics import metrics_router
from ostinato.serve.api.page import page_files, page_router
from ostinato.serve.api.responses import responses_router
from ostinato.serve.api.service import service_router
from ostinato.serve.api.tokens import tokens_router
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.http.counts import AnswerCounts
from ostinato.serve.http.errors import ApiError, as_api_error, from_validation
from ostinato.serve.http.gate import Gate
from ostinato.serve.http.life import Life
from ostinato.serve.http.straight import Straight
from ostinato.serve.openapi import GENERATING, READING


def make_app(life: Life, tracing: Tracing | None = None) -> ASGIApp:
    """The server's application around `life`, which begins and ends with it. Without `tracing` it is as the settings
    have it; ConfigError if that cannot be."""
    settings, counts = life.settings, AnswerCounts()
    if tracing is None and settings.otlp_endpoint is not None:
        tracing = make_tracing(settings.otlp_endpoint, life.model_name)
    api, generating = make_api(life, counts, tracing)
    gate = Gate(Straight(api, generating), settings, counts, tracing)
    if not settings.cors_origin:
        return gate
    # Outside of the gate: a browser asks for leave without a key.
    return CORSMiddleware(
        gate,
        allow_origins=settings.cors_origin,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


def make_api(life: Life, counts: AnswerCounts, tracing: Tracing | None = None) -> tuple[FastAPI, Sequence[APIRouter]]:
    """All endpoints, with what is said of them and of errors; and those again that generate text."""
    text_of = lru_cache(maxsize=1)(partial(ModelText, max_images=life.settings.max_images))
    generating = [router(life, text_of) for router in (chat_router, completions_router, responses_router)]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        life.begin()
        yield
        await life.end()
        if tracing is not None:
            await asyncio.to_thread(tracing.end)

    app = FastAPI(
        title="Ostinato",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in (*generating, tokens_router(life, text_of)):
        app.include_router(router, responses=GENERATING)
    # Behind what is asked most: routes are tried in order.
    app.include_router(service_router(life), responses=READING)
    app.include_router(page_router())
    app.mount("/page", page_files())
    app.include_router(metrics_router(life, counts), responses=READING)
    app.include_router(live_router(life), responses=READING)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        content_type = request.headers.get("content-type", "")
        return from_validation(error.errors(), error.body, content_type).response()

    @app.exception_handler(ApiError)
    @app.exception_handler(RequestError)
    async def refused(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(HTTPException)
    async def not_served(_: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()  # and the gate, which gets it too, logs it

    return app, generating
