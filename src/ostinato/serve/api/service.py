"""What the server shows of itself: `/health`, `/version`, `/plan`, `/v1/models`, `/about`, `/live`, `/prefixes` and
`/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.core import Metric

from ostinato._version import __version__
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.replicas.replicated_engine import ReplicatedEngine
from ostinato.observe.answer_counts import AnswerCounts
from ostinato.observe.exposition import CONTENT_TYPE_LATEST, exposition, together
from ostinato.observe.histograms import Meter
from ostinato.observe.metrics import families
from ostinato.observe.server_metrics import (
    answers,
    connections,
    drains,
    heartbeat,
    loop_delay,
    of_keys,
    refusals,
    workers,
)
from ostinato.serve.api.about import about_model
from ostinato.serve.api.generation import check_model
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.work.model import Model


def service_router(lifecycle: Lifecycle, made: Callable[[], Model]) -> APIRouter:
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

    @router.get("/about")
    async def about() -> dict[str, Any]:
        """What the model is and takes, the sampling where a request says nothing, and what one may ask it."""
        return about_model(made(), lifecycle.model_name)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What the checkpoint's tokenizer_config.json says, with the chat template in use, for vLLM's clients."""
        engine = lifecycle.engine
        template = engine.chat_template.as_stored
        return {"tokenizer_class": "PreTrainedTokenizerFast", **engine.tokenizer.settings, "chat_template": template}

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
            "max_num_seqs": engine.admission.max_running,
            "stats": seen.stats,
            "latency": _latencies(seen.meter),
        }

    @router.get("/prefixes")
    async def prefixes() -> dict[str, Any]:
        """The texts that the prefix cache used last, as branches of a tree: where they part, where checkpoints stand,
        and how often each was hit. Positions in tokens. No word of a text is in it, as it may be another client's."""
        # One that has stalled would not answer, and `engine` says so.
        engine = lifecycle.engine if lifecycle.status == "stalled" else lifecycle.present_engine
        return await engine.prefixes()

    @router.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        """The counts of engine and server, for Prometheus. Those of keys need a key (`ApiKeys.seen_by`). 503 until the
        engine runs, so that no series begins with zeros that nobody measured."""
        seen_keys = lifecycle.keys.seen_by(request.headers.get("authorization"), request.headers.get("x-api-key"))
        engine = lifecycle.present_engine
        labels = {"model_name": lifecycle.model_name, "engine": "0"}
        memory, prefix = asdict(engine.plan.memory), lifecycle.settings.metrics_prefix
        outside = connections(lifecycle.occupancy.total, lifecycle.occupancy.refused, prefix, labels)
        of_each = [
            families(seen.stats, seen.meter, memory, prefix, {**labels, "engine": name})
            for name, seen in (await engine.all_seen()).items()
        ]
        of_engine = [*outside, *together(of_each)]
        alive = heartbeat(engine.heartbeat_age, prefix, labels)
        delay, reads = lifecycle.loop_delay, lifecycle.present_workers
        served = [
            alive,
            *loop_delay(delay.seconds, delay.num_stalls, prefix, labels),
            *workers(reads.num_done, reads.num_ended_early, reads.num_running, prefix, labels),
            *of_keys(counts.key_rows, lifecycle.keys.weights, seen_keys, prefix, labels),
            *_drains(engine, prefix, labels),
            refusals(lifecycle.refusals.counts, prefix, labels),
            answers(counts.rows(), labels),
        ]
        return Response(exposition([*of_engine, *served]), media_type=CONTENT_TYPE_LATEST)

    return router


def _drains(engine: AsyncEngine, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Only several engines are ended one without the other."""
    if isinstance(engine, ReplicatedEngine):
        counts = engine.replicas.moving.counts
        yield drains(counts.moved, counts.stayed, prefix, labels)


def _latencies(meter: Meter) -> dict[str, dict[str, float | None]]:
    """Quantiles in seconds, each a bound of its histogram; None where nothing was measured."""
    measured = {"first_token": meter.first_token, "inter_token": meter.inter_token, "step": meter.step}
    return {
        name: {"p50": histogram.quantile(0.5), "p90": histogram.quantile(0.9), "p99": histogram.quantile(0.99)}
        for name, histogram in measured.items()
    }
