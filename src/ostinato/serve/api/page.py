"""`GET /`: a page to chat with the model and watch the engine. Its files are in `serve/page`."""

from __future__ import annotations

import gzip
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from starlette.datastructures import Headers
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ostinato.serve.http.middleware import ApiRouter

DIRECTORY = Path(__file__).parent.parent / "page"
FOLDER = "/page"
"""Path under which the page's files are, which need no key."""

HEADERS = {
    # Everything comes from this server, and no text becomes markup or a script, so what a model writes cannot run or
    # load anything.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A browser must not mix files of two versions.
    "Cache-Control": "no-cache",
}
_TEXTS = {".html", ".css", ".js", ".mjs", ".svg", ".json"}
"""Suffixes of files that are worth compressing."""


class _Files(StaticFiles):
    def file_response(self, full_path: Any, stat_result: Any, scope: Scope, status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        path = Path(full_path)
        if path.suffix not in _TEXTS:
            return response
        response.headers["Vary"] = "Accept-Encoding"
        if not isinstance(response, FileResponse) or scope["method"] != "GET" or not _takes_gzip(scope):
            return response
        headers = {name: value for name, value in response.headers.items() if name != "content-length"}
        # The tag is weak: the text is the same, the bytes are not.
        headers |= {"content-encoding": "gzip", "etag": f"W/{headers['etag']}"}
        return Response(_compressed(path, stat_result.st_mtime_ns), status_code, headers)


def _takes_gzip(scope: Scope) -> bool:
    asked = Headers(scope=scope).get("accept-encoding", "").replace(" ", "").split(",")
    return any(each == "gzip" or (each.startswith("gzip;q=") and each[7:].strip("0.")) for each in asked)


@lru_cache(maxsize=256)
def _compressed(path: Path, changed: int) -> bytes:
    """Return a file's compressed bytes; `changed` is part of the cache key, so that an edited file is read again."""
    del changed
    return gzip.compress(path.read_bytes(), 6, mtime=0)


def page_files() -> StaticFiles:
    """Return the files that the page loads, to be mounted at `FOLDER`."""
    return _Files(directory=DIRECTORY)


def page_router(root_path: str) -> ApiRouter:
    router, files, index = ApiRouter(is_public=True), _Files(directory=DIRECTORY), DIRECTORY / "index.html"

    if root_path:

        @router.get(root_path, include_in_schema=False)
        async def page_without_slash() -> Response:
            return RedirectResponse(f"{root_path}/")  # the page's links are relative

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files.file_response(index, index.stat(), request.scope)

    return router
