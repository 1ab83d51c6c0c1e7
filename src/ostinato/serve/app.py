"""The application: its endpoints, and errors in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ostinato import __version__
from ostinato.errors import OstinatoError
from ostinato.serve.api.completions import completions_router
from ostinato.serve.api.live import live_router
from ostinato.serve.api.metrics import metrics_router
from ostinato.serve.api.page import page_files, page_router
from ostinato.serve.api.service import service_router
from ostinato.serve.api.tokens import tokens_router
from ostinato.serve.errors import ApiError, as_api_error, from_validation
from ostinato.serve.gate import Gate
from ostinato.serve.life import Life
from ostinato.serve.model_text import ModelText
from ostinato.serve.streaming import ClientGone

log = logging.getLogger("ostinato.serve")


def make_app(life: Life) -> FastAPI:
    """The server's application around `life`, which begins and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        life.begin()
        yield
        await life.end()

    app = FastAPI(title="Ostinato", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(service_router(life))
    app.include_router(page_router())
    app.mount("/page", page_files())
    app.include_router(metrics_router(life))
    app.include_router(live_router(life))
    text_of = lru_cache(maxsize=1)(ModelText)
    for router in (completions_router, tokens_router):
        app.include_router(router(life, text_of))
    app.add_middleware(Gate, keys=life.settings.api_key, max_body=life.settings.max_body)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        content_type = request.headers.get("content-type", "")
        return from_validation(error.errors(), error.body, content_type).response()

    @app.exception_handler(ApiError)
    @app.exception_handler(OstinatoError)
    async def refused(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(HTTPException)
    async def not_served(_: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(*_: object) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        log.error("request %s failed", request.state.request_id, exc_info=error)
        return as_api_error(error).response()

    return app
