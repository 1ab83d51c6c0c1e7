"""`GET /live`: what the engine does now, for the page that shows it."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from ostinato.observe.meter import Meter
from ostinato.serve.http.life import Life


def live_router(life: Life) -> APIRouter:
    router = APIRouter()

    @router.get("/live")
    async def live() -> dict[str, Any]:
        """The engine's counts since its start, and medians of its latencies; `time` in seconds of a monotonic clock,
        so that rates follow from two answers."""
        engine = life.present_engine
        seen = await engine.observe()
        return {
            "time": time.monotonic(),
            "status": life.status,
            "model": life.model_name,
            "max_num_seqs": engine.plan.settings.max_num_seqs,
            "stats": seen.stats,
            "latency": _latencies(seen.meter),
        }

    return router


def _latencies(meter: Meter) -> dict[str, dict[str, float | None]]:
    """Quantiles in seconds, as bounds of the histograms; None where nothing was measured."""
    measured = {"first_token": meter.first_token, "inter_token": meter.inter_token, "step": meter.step}
    return {
        name: {"p50": histogram.quantile(0.5), "p90": histogram.quantile(0.9), "p99": histogram.quantile(0.99)}
        for name, histogram in measured.items()
    }
