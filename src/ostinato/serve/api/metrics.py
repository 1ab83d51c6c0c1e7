"""`GET /metrics`: what the engine does, for Prometheus."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import Response

from ostinato.observe.metrics import CONTENT_TYPE_LATEST, exposition, families
from ostinato.serve.life import Life


def metrics_router(life: Life) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """503 until the engine runs, so that no series begins with what was not measured."""
        engine = life.present_engine
        labels = {"model_name": life.model_name, "engine": "0"}
        seen, memory = await engine.observe(), asdict(engine.plan.memory)
        text = exposition(families(seen.stats, seen.meter, memory, life.settings.metrics_prefix, labels))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router
