"""Latency: seconds to a request's first token and between its tokens, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.bench.drive import bench_config, run_rounds
from ostinato.bench.facts import machine_facts, model_facts, setting_facts
from ostinato.bench.trace import latency_figures
from ostinato.bench.workload import Workload


def latency(settings: dict[str, Any], workload: Workload, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: for each batch size the two latencies in seconds, requests coming all at once."""
    from ostinato.engine.engine import Engine

    config = bench_config(settings, workload)
    engine = Engine(config)
    results = [
        {"batch_size": size, **latency_figures(run_rounds(engine, workload, size, report=report))}
        for size in workload.batch_sizes
    ]
    return {
        "command": "latency",
        "model": model_facts(config, engine.plan),
        "settings": setting_facts(engine.plan, workload),
        "machine": machine_facts(engine.plan),
        "results": results,
    }
