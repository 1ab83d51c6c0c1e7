"""Throughput, latency and start-up: batches of requests that all come at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ostinato.bench.engine_driver import (
    Workload,
    bench_config,
    rotated_order,
    run_batch,
    run_in_process,
    run_rounds,
    share_cache,
)
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    engine_facts,
    engine_lines,
    run_facts,
    spread_columns,
)
from ostinato.bench.roofline import decode_bytes, floor_figures, measure_bandwidth
from ostinato.bench.statistics import RoundTrace, paired_ratio, percentiles, spread
from ostinato.errors import ConfigError, Remedy
from ostinato.json_io import JsonObject
from ostinato.observe.counts import StartupTimer
from ostinato.units import format_bytes
from ostinato.verify.online_checks import MAX_WAITING

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore

RATES = ("total_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")
LENGTHS = "{prompt_len} prompt tokens, {output_len} new"

NAMES = (Column("batch", "batch_size", is_text=True), Column("tokens/s", "name", is_text=True))
"""Columns of rates that have a row each."""
STEP_COLUMNS = (
    Column("batch", "batch_size"),
    Column("decode steps", "decode_steps"),
    Column("p50", "decode_step_seconds.p50", "ms"),
    Column("p99", "decode_step_seconds.p99", "ms"),
    Column("floor", "floor.step_seconds", "ms", help="the bytes that a step must move, at the best bandwidth"),
    Column("reached", "floor.fraction_reached", "percent"),
    Column("bookkeeping", "bookkeeping_share", "{:.2%}", help="its share of the time of all steps"),
    Column("full/piecewise/eager", lambda row: "/".join(map(str, row["step_modes"].values()))),
)
PHASES = {
    "interpreter": "Python itself",
    "import": "of all else",
    "plan": "config.json read, everything decided",
    "tokenizer": "and chat template",
    "model": "its modules made",
    "weights": "read, converted, quantised",
    "memory": "cache and buffers, not yet touched",
    "capture": "graphs, if not left to their first use",
    "scheduler": "and what else stands around a model",
    "first_token": "a prompt computed, one token sampled",
}
"""Phases of a start-up, one after the other, with their explanations."""
PHASE_COLUMNS = (Column("seconds", "phase"), *spread_columns("seconds", "{:,.3f}"), Column("", "what", is_text=True))
LATENCY_COLUMNS = (
    Column("batch", "batch_size"),
    Column("first token p50", "time_to_first_token.p50", "ms"),
    Column("p99", "time_to_first_token.p99", "ms"),
    Column("between tokens p50", "inter_token_latency.p50", "ms"),
    Column("p99", "inter_token_latency.p99", "ms"),
)

PAIRED_RATES = ("total", "decode", "processor")
CHECK_COLUMNS = (
    Column("batch", "batch_size"),
    Column("check", "cost", "times", help="processor time of checking a request over that of serving it"),
    Column("share", "share", "{:.3%}", help="that times the rate: what checks add, in moments without requests"),
)


def throughput(settings: dict[str, object], workload: Workload, say: ProgressCallback) -> BenchReport:
    """Measure rates and steps for each batch size, and the share of the roofline that decode steps reach.

    `bookkeeping_share` is the share of all steps for scheduling batches and applying results. `floor` is None for a
    model whose bytes are not known beforehand; see `decode_bytes`.
    """
    from ostinato.engine.core import EngineCore

    config = bench_config(settings, workload)
    engine = EngineCore(config)
    plan = engine.plan
    results: list[JsonObject] = []
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
    bandwidth = measure_bandwidth(engine.runner.arrays.device, isa=plan.device.native.isa)
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
    tables = [Table((*NAMES, *spread_columns("rate", "count")), rates), Table(STEP_COLUMNS, results)]
    return BenchReport(data, engine_lines(data, LENGTHS), tables)


def record_cost(settings: JsonObject, workload: Workload, say: ProgressCallback) -> BenchReport:
    """Measure the rates of an engine that records what enters its scheduler over those of one that does not.

    Both are in this process and take each round in turns, with the same prompts. The rate `processor` is per second of
    the process's processor time, with the thread that writes: other work on the machine changes it little. Raises
    ConfigError if `record` is given: the benchmark records to a directory that it removes.
    """
    from ostinato.engine.core import EngineCore

    plain = bench_config(settings, workload)
    if plain.is_given("record"):
        raise ConfigError("record is what the benchmark compares; leave it out", [Remedy("record", None)])
    with TemporaryDirectory() as directory:
        configs = share_cache({"plain": plain, "recorded": plain.with_settings(record=directory)})
        engines = {name: EngineCore(config) for name, config in configs.items()}
        results = _paired_rates(engines, workload, say)
        written = engines["recorded"].stats()["record"]
        for engine in engines.values():
            engine.close()
    data = engine_facts("record", plain, engines["plain"].plan, **asdict(workload))
    data |= {"results": results, "record": written}
    return BenchReport(data, engine_lines(data, LENGTHS), [Table(_rate_columns("recorded"), results)])


def verify_cost(settings: JsonObject, workload: Workload, rate: float, say: ProgressCallback) -> BenchReport:
    """Measure the rates of an engine that checks requests online over those of one that does not.

    Rates are while requests run, as in `record_cost`; nothing is checked then. `check` is what idle moments pay: the
    processor time of checking a request over that of serving it, and `share`, that times the rate.
    """
    from ostinato.engine.core import EngineCore
    from ostinato.verify.online_checks import OnlineChecks

    configs = share_cache(dict.fromkeys(("plain", "checked"), bench_config(settings, workload)))
    engines = {name: EngineCore(config) for name, config in configs.items()}
    checked = engines["checked"]
    checked.online_checks = OnlineChecks(checked, rate)
    results = _paired_rates(engines, workload, say)
    checks: list[JsonObject] = []
    for size in workload.batch_sizes:
        served, spent, count = 0.0, 0.0, min(size, MAX_WAITING)
        for number in range(-1, workload.rounds):
            say(f"batch size {size}: checks of {f'round {number + 1}' if number >= 0 else 'the warm-up'}")
            all_checks = checked.online_checks = OnlineChecks(checked, 1.0)
            before = time.process_time()
            prompts = workload.prompts(size, checked.spec.vocab_size, workload.rounds + 1 + number)  # not cached
            run_batch(checked, prompts, workload.output_len)
            middle = time.process_time()
            while all_checks.advance():
                pass
            if number >= 0:
                served += (middle - before) / size
                spent += (time.process_time() - middle) / count
            if all_checks.counts.checked != count:
                raise ConfigError(f"requests are too long to be checked: {all_checks.counts}")
        check = spent / served
        checks.append({"batch_size": size, "cost": check, "share": rate * check})
    for engine in engines.values():
        engine.close()
    data = engine_facts("verify-rate", configs["plain"], checked.plan, **asdict(workload), verify_rate=rate)
    data |= {"results": results, "check": checks}
    tables = [Table(_rate_columns("checked"), results), Table(CHECK_COLUMNS, checks)]
    return BenchReport(data, engine_lines(data, LENGTHS), tables)


def _paired_rates(engines: Mapping[str, EngineCore], workload: Workload, say: ProgressCallback) -> list[JsonObject]:
    """Return the rates of two engines that take each round in turns, and the ratio of the second to the first."""
    base, other = engines
    results: list[JsonObject] = []
    for size in workload.batch_sizes:
        rates = {(rate, name): list[float]() for rate in PAIRED_RATES for name in engines}
        for number in range(-1, workload.rounds):
            say(f"batch size {size}: {f'round {number + 1}' if number >= 0 else 'warming up'}")
            prompts = workload.prompts(size, engines[base].spec.vocab_size, number)
            for name in rotated_order(list(engines), number):
                before = time.process_time()
                trace = run_batch(engines[name], prompts, workload.output_len)
                if number >= 0:
                    tokens = trace.prompt_tokens + trace.output_tokens
                    spent = (tokens / trace.end, trace.decode_rate, tokens / (time.process_time() - before))
                    for rate, value in zip(PAIRED_RATES, spent, strict=True):
                        rates[rate, name].append(value)
        for rate in PAIRED_RATES:
            sides = {name: rates[rate, name] for name in engines}
            ratio = paired_ratio(sides[other], sides[base])
            spreads = {name: spread(values) for name, values in sides.items()}
            results.append({"batch_size": size, "rate": rate, **spreads, "ratio": ratio})
    return results


def _rate_columns(other: str) -> tuple[Column, ...]:
    return (
        Column("batch", "batch_size"),
        Column("tokens/s", "rate", is_text=True),
        Column("plain", "plain.median", "count"),
        Column(other, f"{other}.median", "count"),
        *spread_columns("ratio", "{:.3f}"),
    )


def latency(settings: dict[str, object], workload: Workload, say: ProgressCallback) -> BenchReport:
    """Measure the two latencies in seconds for each batch size, with requests that all come at once."""
    from ostinato.engine.core import EngineCore

    config = bench_config(settings, workload)
    engine = EngineCore(config)
    results = [
        {"batch_size": size, **latency_figures(run_rounds(engine, workload, size, say))}
        for size in workload.batch_sizes
    ]
    data = {**engine_facts("latency", config, engine.plan, **asdict(workload)), "results": results}
    return BenchReport(data, engine_lines(data, LENGTHS), [Table(LATENCY_COLUMNS, results)])


def startup(settings: dict[str, object], workload: Workload, say: ProgressCallback) -> BenchReport:
    """Measure seconds of each phase and of all (`total`), each round in a fresh process, as median, min and max."""
    rounds = []
    for number in range(workload.rounds):
        say(f"round {number + 1}")
        rounds.append(run_in_process("startup", {"settings": settings, "prompt_len": workload.prompt_len}))
    phases = {phase: spread([round_["seconds"][phase] for round_ in rounds]) for phase in (*PHASES, "total")}
    peak = max(round_["peak_memory_bytes"] for round_ in rounds)
    data = {**rounds[0]["facts"], **run_facts("startup")}
    data["settings"] |= {"rounds": workload.rounds}
    data["results"] = [{"rounds": workload.rounds, "seconds": phases, "peak_memory_bytes": peak}]
    rows = [
        {"phase": phase, "seconds": seconds, "what": PHASES.get(phase, "from the start of the process on")}
        for phase, seconds in phases.items()
    ]
    lines = {**engine_lines(data, LENGTHS), "peak memory": format_bytes(peak)}
    return BenchReport(data, lines, [Table(PHASE_COLUMNS, rows)])


def answer_startup(job: JsonObject) -> JsonObject:
    """Start up once in this process, which began at `began` and entered Python code at `entered`."""
    phases = StartupTimer(job["began"])
    phases.end("interpreter", job["entered"])
    phases.end("import")
    gc.disable()  # `ostinato.LLM` does the same on import
    from ostinato.engine.core import EngineCore

    gc.enable()
    phases.end("import")
    workload = Workload(job["prompt_len"], output_len=1, batch_sizes=(1,), rounds=1)
    config = bench_config(job["settings"], workload)
    if "capture" not in job["settings"]:
        config = config.with_settings(capture="auto")  # the default without measuring
    engine = EngineCore(config, phases=phases)
    run_batch(engine, workload.prompts(1, engine.spec.vocab_size, 0), output_len=1)
    phases.end("first_token")
    facts = engine_facts("startup", config, engine.plan, **asdict(workload))
    return {"seconds": {**phases.seconds, "total": sum(phases.seconds.values())}, "facts": facts}


def name_of(rate: str) -> str:
    return rate.removesuffix("_tokens_per_second")


def throughput_figures(traces: Sequence[RoundTrace]) -> JsonObject:
    """Return rates in tokens/s, each as median, min and max over the rounds, and the lengths of decode steps.

    `total` counts prompt and output tokens over the whole round, `output` the output tokens alone; `prefill` prompt
    tokens until every request had its first output token; `decode` the tokens after that moment, over the time after
    it, None if there are none.
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


def latency_figures(traces: Sequence[RoundTrace]) -> JsonObject:
    """Return the seconds to the first token and between tokens, over all requests of all rounds."""
    requests = [times for trace in traces for times in trace.token_times]
    gaps = [later - earlier for times in requests for earlier, later in pairwise(times)]
    return {
        "time_to_first_token": percentiles([times[0] for times in requests]),
        "inter_token_latency": percentiles(gaps),
    }
