"""What is there beside generating: `/health`, `/version`, `/plan`, `/v1/models`, and each by its name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from ostinato import __version__
from ostinato.serve.http.life import Life
from ostinato.serve.protocol.common import check_model


def service_router(life: Life) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 once a step has succeeded and while requests are taken, else 503; the body says which."""
        status = life.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/plan")
    async def plan() -> dict[str, Any]:
        """What was decided before the weights were loaded, and what was measured since."""
        return life.engine.plan.to_json()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(life)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, life.model_name)
        return _model(life)

    return router


def _model(life: Life) -> dict[str, Any]:
    max_model_len = life.engine.plan.settings.max_model_len
    return {
        "id": life.model_name,
        "object": "model",
        "created": life.created,
        "owned_by": "ostinato",
        "max_model_len": max_model_len,
    }
