"""Batches of requests that all come at once: tokens per second, and seconds to and between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from typing import Any

from ostinato.bench.drive import Workload, bench_config, run_rounds
from ostinato.bench.floor import decode_bytes, floor_figures, measure_bandwidth
from ostinato.bench.reports import (
    Column,
    Report,
    Say,
    Table,
    count,
    digits,
    engine_facts,
    engine_lines,
    milliseconds,
    percent,
    spread_columns,
)
from ostinato.bench.trace import Trace, percentiles, spread

RATES = ("total_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")
LENGTHS = "{prompt_len} prompt tokens, {output_len} new"

NAMES = (Column("batch", "batch_size", is_text=True), Column("tokens/s", "name", is_text=True))
"""Of rates, each a row of its own."""
STEP_COLUMNS = (
    Column("batch", "batch_size"),
    Column("decode steps", "decode_steps"),
    Column("p50", "decode_step_seconds.p50", milliseconds),
    Column("p99", "decode_step_seconds.p99", milliseconds),
    Column("floor", "floor.step_seconds", milliseconds, help="the bytes that a step must move, at the best bandwidth"),
    Column("reached", "floor.fraction_reached", percent),
    Column("bookkeeping", "bookkeeping_share", digits(2, "%", 100), help="its share of the time of all steps"),
    Column("full/piecewise/eager", lambda row: "/".join(map(str, row["step_modes"].values()))),
)
LATENCY_COLUMNS = (
    Column("batch", "batch_size"),
    Column("first token p50", "time_to_first_token.p50", milliseconds),
    Column("p99", "time_to_first_token.p99", milliseconds),
    Column("between tokens p50", "inter_token_latency.p50", milliseconds),
    Column("p99", "inter_token_latency.p99", milliseconds),
)


def throughput(settings: dict[str, Any], workload: Workload, say: Say) -> Report:
    """For each batch size: rates, steps, and how far decode steps are from their floor.

    `bookkeeping_share` is the part of all steps that went into choosing batches and taking results in. `floor`
    is None for a model whose floor is not known beforehand; see `decode_bytes`.
    """
    from ostinato.engine.engine import Engine

    config = bench_config(settings, workload)
    engine = Engine(config)
    plan = engine.plan
    results: list[dict[str, Any]] = []
    for batch_size in workload.batch_sizes:
        before = engine.stats()
        figures = throughput_figures(run_rounds(engine, workload, batch_size, say))
        after = engine.stats()
        modes = {mode: steps - before["graphs"]["steps"][mode] for mode, steps in after["graphs"]["steps"].items()}
        spent = {name: after[name] - before[name] for name in ("preemptions", "bookkeeping_seconds", "step_seconds")}
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
    say("measuring the memory's bandwidth")
    bandwidth = measure_bandwidth(engine.runner.device, isa=plan.device.native.isa)
    for result in results:
        context = workload.prompt_len + workload.output_len / 2
        needed = decode_bytes(engine.spec, plan, result["batch_size"], context)
        if needed is not None and result["decode_step_seconds"] is not None:
            result["floor"] = floor_figures(needed, bandwidth, result["decode_step_seconds"]["p50"])
    data = engine_facts("throughput", config, plan, **asdict(workload))
    data["machine"] |= bandwidth.to_json()
    data["results"] = results
    rates = [
        {"batch_size": result["batch_size"], "name": name_of(rate), "rate": result[rate]}
        for result in results
        for rate in RATES
    ]
    tables = [Table((*NAMES, *spread_columns("rate", count)), rates), Table(STEP_COLUMNS, results)]
    return Report(data, engine_lines(data, LENGTHS), tables)


def latency(settings: dict[str, Any], workload: Workload, say: Say) -> Report:
    """For each batch size the two latencies in seconds, requests coming all at once."""
    from ostinato.engine.engine import Engine

    config = bench_config(settings, workload)
    engine = Engine(config)
    results = [
        {"batch_size": size, **latency_figures(run_rounds(engine, workload, size, say))}
        for size in workload.batch_sizes
    ]
    data = {**engine_facts("latency", config, engine.plan, **asdict(workload)), "results": results}
    return Report(data, engine_lines(data, LENGTHS), [Table(LATENCY_COLUMNS, results)])


def name_of(rate: str) -> str:
    return rate.removesuffix("_tokens_per_second")


def throughput_figures(traces: Sequence[Trace]) -> dict[str, Any]:
    """Rates in tokens/s, each as median, min and max over the rounds, and the lengths of decode steps.

    `total` counts prompt and output tokens over the whole round, `output` the output tokens alone; `prefill`
    prompt tokens until every request had its first output token; `decode` the tokens after that moment, over
    the time after it, None if there are none.
    """
    decodes = [trace for trace in traces if trace.decode_tokens]
    rates = {
        "total_tokens_per_second": [(t.prompt_tokens + t.output_tokens) / t.end for t in traces],
        "output_tokens_per_second": [t.output_tokens / t.end for t in traces],
        "prefill_tokens_per_second": [t.prompt_tokens / t.prefill_end for t in traces],
        "decode_tokens_per_second": [t.decode_rate for t in decodes],
        "seconds": [t.end for t in traces],
    }
    steps = list(chain.from_iterable(trace.decode_step_seconds for trace in traces))
    return {
        **{name: spread(values) for name, values in rates.items()},
        "steps": len(traces[0].step_ends),
        "decode_steps": len(traces[0].decode_step_seconds),
        "decode_step_seconds": percentiles(steps),
    }


def latency_figures(traces: Sequence[Trace]) -> dict[str, Any]:
    """Seconds to the first token and between tokens, over all requests of all rounds."""
    requests = [times for trace in traces for times in trace.token_times]
    gaps = [later - earlier for times in requests for earlier, later in pairwise(times)]
    return {
        "time_to_first_token": percentiles([times[0] for times in requests]),
        "inter_token_latency": percentiles(gaps),
    }
