"""Endpoints about the server and its model.

They are `/health`, `/version`, `/plan`, `/v1/models`, `/about`, `/live`, `/prefixes` and `/metrics`. `/about` has facts
about the model for visitors of the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.core import Metric
from starlette.exceptions import HTTPException

from ostinato._version import __version__
from ostinato.demo import INTRODUCTIONS, Introduction
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.json_io import JsonObject
from ostinato.observe.counts import EngineHistograms
from ostinato.observe.metrics import CONTENT_TYPE_LATEST, families, merge_metrics, render_metrics
from ostinato.observe.request_record import ResponseCounts
from ostinato.observe.server_metrics import (
    answers,
    connections,
    drains,
    dropped_lines,
    heartbeat,
    key_metrics,
    loop_delay,
    refusals,
    unread_answers,
    workers,
)
from ostinato.replicas.replicated_engine import ReplicatedEngine
from ostinato.serve.api.generation_fields import check_model
from ostinato.serve.api.generation_run import ServedModel
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.chat.tool_calls.formats import EQUATION
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OTHERS = Introduction(
    "",
    (
        "Explain in three sentences what a state space model keeps of a text.",
        "Write a Python function that says whether a number is prime, with a test.",
        "Derive the sum of the first n odd numbers, in formulas.",
        "Compare three ways to brew coffee in a table.",
    ),
)
"""Example questions for a model without an introduction."""


def about_model(model: ServedModel, name: str) -> JsonObject:
    """Return the answer of `/about` as plain data.

    `examples` are questions, some with a picture (a path below the page's own). `chat_sampling` are the settings that
    the page sends if its fields are empty, in place of the defaults in `sampling`.
    """
    engine, text = model.engine, model.text
    spec, settings = engine.plan.model, engine.plan.settings
    known = INTRODUCTIONS.get(settings.model, _OTHERS)
    return {
        "model": name,
        "architecture": spec.architecture,
        "parameters": spec.parameters,
        "layers": spec.layers,
        "max_model_len": settings.max_model_len,
        "introduction": known.text or None,
        "examples": [{"text": question, "image": known.image(question)} for question in known.questions],
        "chats": text.chat_template.has_default,
        "takes_images": text.media is not None,
        "takes_tools": text.takes_tools and text.formats.tools != EQUATION,  # which is for one tool, not for any
        "reasons": text.formats.reasoning is not None,
        "sampling": {key: getattr(engine.default_params, key) for key in _SAMPLING},
        "chat_sampling": engine.tokenizer.chat_defaults,
    }


def public_router(lifecycle: Lifecycle, counts: ResponseCounts) -> ApiRouter:
    router = ApiRouter(is_public=True)

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """Return 200 once a step has succeeded and while requests are accepted, else 503. The body has the status.

        With `verify_rate` it also has `verify`, the counts of online checks when the engine last answered.
        """
        status = lifecycle.status
        checks = lifecycle.engine.last_stats.get("verify") if status == "ready" else None
        body = {"status": status} if checks is None else {"status": status, "verify": checks}
        return JSONResponse(body, 200 if status == "ready" else 503)

    @router.get("/health/live", response_model=None)
    async def alive() -> Response:
        """Return 200 while the server may still do its work, else 503.

        It may also while it loads or drains. 503 means that it failed or stalled, so that only a restart helps.
        """
        status = lifecycle.status
        return JSONResponse({"status": status}, 503 if status in ("failed", "stalled") else 200)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the server's version."""
        return {"version": __version__}

    @router.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        """Return the counts of engine and server, for Prometheus.

        Those of keys need a key (`ApiKeys.seen_by`). 503 until the engine runs, so that no series begins with zeros
        that were never measured.
        """
        seen_keys = lifecycle.keys.seen_by(request.headers.get("authorization"), request.headers.get("x-api-key"))
        engine = lifecycle.present_engine
        labels = {"model_name": lifecycle.model_name, "engine": "0"}
        memory, prefix = asdict(engine.plan.memory), lifecycle.settings.metrics_prefix
        outside = connections(lifecycle.occupancy.total, lifecycle.occupancy.refused, prefix, labels)
        of_each = [
            families(seen.stats, seen.meter, memory, prefix, {**labels, "engine": name})
            for name, seen in (await engine.all_observations()).items()
        ]
        of_engine = [*outside, *merge_metrics(of_each)]
        alive = heartbeat(engine.heartbeat_age, prefix, labels)
        delay, reads = lifecycle.loop_delay, lifecycle.present_workers
        served = [
            alive,
            unread_answers(engine.backlog.held_bytes.total(), prefix, labels),
            *loop_delay(delay.seconds, delay.num_stalls, prefix, labels),
            *workers(reads.num_done, reads.num_ended_early, reads.num_running, prefix, labels),
            *key_metrics(counts.key_rows, lifecycle.keys.weights, seen_keys, prefix, labels),
            *_drains(engine, prefix, labels),
            refusals(lifecycle.refusals.counts, prefix, labels),
            dropped_lines(lifecycle.dropped_lines(), prefix, labels),
            answers(counts.rows(), labels),
        ]
        return Response(render_metrics([*of_engine, *served]), media_type=CONTENT_TYPE_LATEST)

    return router


def service_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter()

    @router.get("/plan")
    async def plan() -> JsonObject:
        """Return the decisions made before the weights were loaded, and the measurements since."""
        return lifecycle.engine.plan.to_json()

    @router.get("/about")
    async def about() -> JsonObject:
        """Describe the model, its inputs, its default sampling and example questions."""
        return about_model(served_model(), lifecycle.model_name)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> JsonObject:
        """Return the checkpoint's tokenizer_config.json with the chat template in use, for vLLM's clients."""
        engine = lifecycle.engine
        template = engine.chat_template.as_stored
        return {"tokenizer_class": "PreTrainedTokenizerFast", **engine.tokenizer.settings, "chat_template": template}

    @router.get("/v1/models")
    async def models() -> JsonObject:
        """List the names of the one model."""
        names = lifecycle.settings.served_model_name or (lifecycle.model_name,)
        return {"object": "list", "data": [_model(lifecycle, name, served_model().text) for name in names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JsonObject:
        """Describe the model."""
        if not name:
            raise HTTPException(404)  # as any path with a slash too many
        check_model(name, lifecycle.model_name, lifecycle.settings)
        return _model(lifecycle, name, served_model().text)

    return router


def _model(lifecycle: Lifecycle, name: str, text: ModelText) -> JsonObject:
    """Describe the model. `tool_call_parser` is the form of its tool calls; null if it takes no tools."""
    parser = text.formats.tools.parser if text.formats.tools is not None and text.takes_tools else None
    return {
        "id": name,
        "object": "model",
        "created": lifecycle.created,
        "owned_by": "ostinato",
        "tool_call_parser": parser,
        "max_model_len": lifecycle.engine.plan.settings.max_model_len,
    }


def observation_router(lifecycle: Lifecycle) -> ApiRouter:
    router = ApiRouter()

    @router.get("/live")
    async def live() -> JsonObject:
        """Return the engine's counts since its start, and quantiles of its latencies.

        `time` is in seconds of a monotonic clock: two answers give rates. While the engine does not answer, these are
        its last counts, and `heartbeat_age` is the number of seconds without an answer.
        """
        engine = lifecycle.present_engine
        seen = await engine.latest_observation()
        return {
            "time": time.monotonic(),
            "status": lifecycle.status,
            "heartbeat_age": engine.heartbeat_age,
            "model": lifecycle.model_name,
            "max_num_seqs": engine.queue_limit.max_running,
            "stats": seen.stats,
            "latency": _latencies(seen.meter),
        }

    @router.get("/prefixes")
    async def prefixes() -> JsonObject:
        """Return the prefixes that the prefix cache used last, as branches of a tree.

        They show where prefixes part, where checkpoints are, and how often each was hit. Positions are in tokens. The
        answer contains no text, as it may be another client's.
        """
        # A stalled engine would not answer, and `engine` raises the error.
        engine = lifecycle.engine if lifecycle.status == "stalled" else lifecycle.present_engine
        return await engine.prefixes()

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        """Drop all cached prefixes. 403 unless the setting `allow_cache_reset` is on; 409 if requests use some."""
        if not lifecycle.settings.allow_cache_reset:
            message = "the prefix cache is reset only by a server that is started with --allow-cache-reset"
            raise ApiError(403, message, code="allow_cache_reset")
        if not await lifecycle.engine.reset_prefix_cache():
            message = "running requests use some cached prefixes, which stay; try again when they have ended"
            raise ApiError(409, message, code="cache_in_use", headers={"Retry-After": "1"})
        return {"reset": True}

    return router


def _drains(engine: AsyncEngine, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metric of drains if there are several engines: only those end one by one."""
    if isinstance(engine, ReplicatedEngine):
        counts = engine.replicas.moving.counts
        yield drains(counts.moved, counts.stayed, prefix, labels)


def _latencies(meter: EngineHistograms) -> dict[str, dict[str, float | None]]:
    """Return quantiles in seconds, each a bound of its histogram; None if nothing was measured."""
    measured = {"first_token": meter.first_token, "inter_token": meter.inter_token, "step": meter.step}
    return {
        name: {"p50": histogram.quantile(0.5), "p90": histogram.quantile(0.9), "p99": histogram.quantile(0.99)}
        for name, histogram in measured.items()
    }
