"""`GET /`: a page to chat with the model and watch the engine. Its files are in `serve/page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

DIRECTORY = Path(__file__).parent.parent / "page"

_HEADERS = {
    # Everything comes from this server, so text of a model cannot run or load anything.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # So that a browser does not mix files of two versions.
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(DIRECTORY / "index.html", headers=_HEADERS)

    return router


class _Files(StaticFiles):
    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers.update(_HEADERS)
        return response


def page_files() -> StaticFiles:
    """The files that the page loads, to be mounted at `/page`."""
    return _Files(directory=DIRECTORY)
