"""What `Engine.stats` tells: the counts of every room, and the cache's present use, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ostinato.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine


def engine_stats(engine: Engine) -> dict[str, Any]:
    """Counts since the start."""
    scheduler, runner = engine.scheduler, engine.runner
    speculation = None
    if engine.speculation is not None and runner.drafting is not None:
        of_drafts = runner.drafting.graphs.counts.to_json() if runner.drafting.graphs is not None else None
        speculation = {**engine.speculation.to_json(), "graphs": of_drafts}
    encoder = None
    if runner.encoder is not None:
        encoder = {
            "graphs": runner.encoder.counts.to_json() | runner.encoder.figures(),
            "cache": _encoder_cache_use(scheduler),
        }
    return {
        **asdict(engine.counts),
        **asdict(scheduler.counters),
        "graphs": runner.graphs.counts.to_json() | runner.graph_figures(),
        "waiting": scheduler.num_waiting,
        "running": scheduler.num_running,
        "cache": asdict(scheduler.cache.usage()),
        "prefix_cache": {**asdict(scheduler.prefix_counters), **asdict(scheduler.cache.store.counters)},
        "speculation": speculation,
        "encoder": encoder,
    }


def _encoder_cache_use(scheduler: Scheduler) -> dict[str, int]:
    """What the encoder cache has counted, and its present use in cells. A cell holds one token of an image."""
    cache = scheduler.encoder_cache
    assert cache is not None, "only models that take images have one"
    return {
        **asdict(cache.counters),
        "items": cache.num_items,
        "cells_used": cache.num_pinned,
        "cells_cached": cache.num_cached,
        "cells_total": cache.capacity,
    }
