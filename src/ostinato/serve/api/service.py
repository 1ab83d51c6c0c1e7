"""What the server shows of itself: `/health`, `/version`, `/plan`, `/v1/models`, `/live` and `/metrics`.

And `GET /`: a page to chat with the model and watch the engine. Its files are in `serve/page`.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from ostinato import __version__
from ostinato.observe.counts import AnswerCounts, Meter
from ostinato.observe.metrics import (
    CONTENT_TYPE_LATEST,
    answers,
    connections,
    exposition,
    families,
    heartbeat,
    loop_delay,
    of_keys,
    refusals,
    workers,
)
from ostinato.serve.api.generation import check_model
from ostinato.serve.http.lifecycle import Lifecycle


def service_router(lifecycle: Lifecycle) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 once a step has succeeded and while requests are accepted, else 503. The body says which."""
        status = lifecycle.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @router.get("/health/live", response_model=None)
    async def alive() -> Response:
        """200 while the server may still do its work, also while it loads or drains; 503 if it failed or stalled, so
        that only a restart helps."""
        status = lifecycle.status
        return JSONResponse({"status": status}, 503 if status in ("failed", "stalled") else 200)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/plan")
    async def plan() -> dict[str, Any]:
        """What was decided before the weights were loaded, and what was measured since."""
        return lifecycle.engine.plan.to_json()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(lifecycle)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, lifecycle.model_name)
        return _model(lifecycle)

    return router


def _model(lifecycle: Lifecycle) -> dict[str, Any]:
    return {
        "id": lifecycle.model_name,
        "object": "model",
        "created": lifecycle.created,
        "owned_by": "ostinato",
        "max_model_len": lifecycle.engine.plan.settings.max_model_len,
    }


def observation_router(lifecycle: Lifecycle, counts: AnswerCounts) -> APIRouter:
    router = APIRouter()

    @router.get("/live")
    async def live() -> dict[str, Any]:
        """The engine's counts since its start, and quantiles of its latencies. `time` is in seconds of a monotonic
        clock: two answers give rates. While the engine does not answer, these are its last counts, and `heartbeat_age`
        says for how many seconds it has not."""
        engine = lifecycle.present_engine
        seen = await engine.last_seen()
        return {
            "time": time.monotonic(),
            "status": lifecycle.status,
            "heartbeat_age": engine.heartbeat_age,
            "model": lifecycle.model_name,
            "max_num_seqs": engine.plan.settings.max_num_seqs,
            "stats": seen.stats,
            "latency": _latencies(seen.meter),
        }

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """The counts of engine and server, for Prometheus. 503 until the engine runs, so that no series begins with
        zeros that nobody measured."""
        engine = lifecycle.present_engine
        labels = {"model_name": lifecycle.model_name, "engine": "0"}
        seen, memory = await engine.last_seen(), asdict(engine.plan.memory)
        prefix = lifecycle.settings.metrics_prefix
        outside = connections(lifecycle.occupancy.total, lifecycle.occupancy.refused, prefix, labels)
        of_engine = [*outside, *families(seen.stats, seen.meter, memory, prefix, labels)]
        alive = heartbeat(engine.heartbeat_age, prefix, labels)
        delay, reads = lifecycle.loop_delay, lifecycle.present_workers
        served = [
            alive,
            *loop_delay(delay.seconds, delay.num_stalls, prefix, labels),
            *workers(reads.num_done, reads.num_ended_early, reads.num_running, prefix, labels),
            *of_keys(counts.key_rows, prefix, labels),
            refusals(lifecycle.refusals.counts, prefix, labels),
            answers(counts.rows(), labels),
        ]
        return Response(exposition([*of_engine, *served]), media_type=CONTENT_TYPE_LATEST)

    return router


def _latencies(meter: Meter) -> dict[str, dict[str, float | None]]:
    """Quantiles in seconds, each a bound of its histogram; None where nothing was measured."""
    measured = {"first_token": meter.first_token, "inter_token": meter.inter_token, "step": meter.step}
    return {
        name: {"p50": histogram.quantile(0.5), "p90": histogram.quantile(0.9), "p99": histogram.quantile(0.99)}
        for name, histogram in measured.items()
    }


DIRECTORY = Path(__file__).parent.parent / "page"

_HEADERS = {
    # Everything comes from this server, so text of a model cannot run or load anything.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # So that a browser does not mix files of two versions.
    "Cache-Control": "no-cache",
}


def page_router(root_path: str) -> APIRouter:
    router = APIRouter()

    if root_path:

        @router.get(root_path, include_in_schema=False)
        async def page_without_slash() -> Response:
            return RedirectResponse(f"{root_path}/")  # the page's links are relative

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
