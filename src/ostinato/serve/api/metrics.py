"""`GET /metrics`: what the engine does, and how requests were answered, for Prometheus."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import Response

from ostinato.observe.metrics import CONTENT_TYPE_LATEST, answers, exposition, families
from ostinato.serve.http.counts import AnswerCounts
from ostinato.serve.http.life import Life


def metrics_router(life: Life, counts: AnswerCounts) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """503 until the engine runs, so that no series begins with what was not measured."""
        engine = life.present_engine
        labels = {"model_name": life.model_name, "engine": "0"}
        seen, memory = await engine.observe(), asdict(engine.plan.memory)
        of_engine = families(seen.stats, seen.meter, memory, life.settings.metrics_prefix, labels)
        return Response(exposition([*of_engine, answers(counts.rows(), labels)]), media_type=CONTENT_TYPE_LATEST)

    return router
