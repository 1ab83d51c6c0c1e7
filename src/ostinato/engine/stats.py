"""Statistics of `EngineCore.stats`: the counts of every part, and the cache's present use, as plain data."""

from __future__ import annotations

from dataclasses import asdict

from ostinato.json_io import JsonObject
from ostinato.observe.counts import EngineCounts
from ostinato.plan.traffic import RequestLengths
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduler.scheduler import Scheduler
from ostinato.spec_decode.controller import SpeculationMonitor


def engine_stats(
    counts: EngineCounts,
    lengths: RequestLengths,
    scheduler: Scheduler,
    runner: ModelRunner,
    speculation: SpeculationMonitor | None,
) -> JsonObject:
    """Return the counts since the start."""
    of_drafts = None
    if speculation is not None and runner.drafter is not None:
        graphs = runner.drafter.graphs
        of_drafts = {**speculation.to_json(), "graphs": None if graphs is None else graphs.counts.to_json()}
    encoder = None
    if runner.encoder_graphs is not None:
        encoder = {
            "graphs": runner.encoder_graphs.counts.to_json() | runner.encoder_graphs.figures(),
            "cache": _encoder_cache_stats(scheduler),
        }
    return {
        **asdict(counts),
        **asdict(scheduler.counters),
        "request_lengths": lengths.to_json(),
        "graphs": runner.graphs.counts.to_json() | runner.graph_figures(),
        "waiting": scheduler.num_waiting,
        "running": scheduler.num_running,
        "cache": asdict(scheduler.cache.usage()),
        "prefix_cache": {
            **asdict(scheduler.prefix_counters),
            **asdict(scheduler.cache.store.counters),
            "pinned_checkpoints": len(scheduler.cache.store.pins.pinned),
        },
        "cache_files": _cache_file_stats(scheduler),
        "moves": asdict(scheduler.migration_counts),
        "speculation": of_drafts,
        "encoder": encoder,
    }


def _cache_file_stats(scheduler: Scheduler) -> dict[str, int] | None:
    """Return the counts of the prefix cache's files, and how many there are; None without any."""
    files = scheduler.cache.store.files
    if files is None:
        return None
    directory = files.directory
    return {**asdict(directory.counts), "files": directory.num_files, "bytes": directory.num_bytes}


def _encoder_cache_stats(scheduler: Scheduler) -> dict[str, int]:
    """Return the counts of the encoder cache, and its present use in cells. A cell holds one token of an image."""
    cache = scheduler.encoder_cache
    assert cache is not None, "only models that take images have one"
    return {
        **asdict(cache.counters),
        "items": cache.num_items,
        "cells_used": cache.num_pinned,
        "cells_cached": cache.num_cached,
        "cells_total": cache.capacity,
    }
