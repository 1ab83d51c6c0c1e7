"""Offline throughput: batches of requests that all come at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.bench.drive import bench_config, run_rounds
from ostinato.bench.facts import machine_facts, model_facts, setting_facts
from ostinato.bench.floor import decode_bytes, floor_figures, measure_bandwidth
from ostinato.bench.trace import throughput_figures
from ostinato.bench.workload import Workload


def throughput(settings: dict[str, Any], workload: Workload, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: for each batch size rates, steps, and how far decode steps are from their floor.

    `bookkeeping_share` is the part of all steps that went into choosing batches and taking results in. `floor`
    is None for a model whose floor is not known beforehand; see `decode_bytes`.
    """
    from ostinato.engine.engine import Engine

    config = bench_config(settings, workload)
    engine = Engine(config)
    plan = engine.plan
    results = []
    for batch_size in workload.batch_sizes:
        before = engine.stats()
        figures = throughput_figures(run_rounds(engine, workload, batch_size, report=report))
        after = engine.stats()
        spent = {name: after[name] - before[name] for name in ("preemptions", "bookkeeping_seconds", "step_seconds")}
        modes = {mode: steps - before["graphs"]["steps"][mode] for mode, steps in after["graphs"]["steps"].items()}
        results.append(
            {
                "batch_size": batch_size,
                **figures,
                "preemptions": spent["preemptions"],
                "step_modes": modes,
                "bookkeeping_share": spent["bookkeeping_seconds"] / spent["step_seconds"],
                "floor": None,
            }
        )
    report("measuring the memory's bandwidth")
    bandwidth = measure_bandwidth(engine.runner.device, isa=plan.device.native.isa)
    for result in results:
        needed = decode_bytes(
            engine.spec,
            plan.settings.dtype,
            plan.memory,
            plan.settings.block_size,
            rows=result["batch_size"],
            context=workload.prompt_len + workload.output_len / 2,
        )
        if needed is not None and result["decode_step_seconds"] is not None:
            result["floor"] = floor_figures(needed, bandwidth, result["decode_step_seconds"]["p50"])
    return {
        "command": "throughput",
        "model": model_facts(config, plan),
        "settings": setting_facts(plan, workload),
        "machine": {
            **machine_facts(plan),
            "read_bytes_per_second": bandwidth.read,
            "copy_bytes_per_second": bandwidth.copy,
        },
        "results": results,
    }
