"""Throughput beside another engine, in turns on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

from ostinato.bench.drive import bench_config, run_rounds
from ostinato.bench.facts import machine_facts, model_facts, setting_facts
from ostinato.bench.trace import Trace, throughput_figures
from ostinato.bench.worker import ask
from ostinato.bench.workload import Workload
from ostinato.errors import ConfigError

PEERS = ("transformers",)
RATES = ("total_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")


def check_peer(peer: str) -> None:
    """ConfigError if `peer` is not known or not installed."""
    if peer not in PEERS:
        raise ConfigError(f"cannot compare with {peer!r}; the known ones are {', '.join(PEERS)}")
    if find_spec(peer) is None:
        raise ConfigError(f"comparing with {peer} needs it installed: pip install {peer}")


def compare(settings: dict[str, Any], workload: Workload, peer: str, report: Callable[[str], None]) -> dict[str, Any]:
    """The report of both engines, and the ratio of their median rates (above 1: Ostinato is faster).

    Each round is a process of Ostinato, then one of the peer; both load the model, warm up and run one
    counted batch of each size, with the same prompts, dtype and number of threads.
    """
    check_peer(peer)
    one_round = asdict(replace(workload, rounds=1))
    answers: dict[str, list[dict[str, Any]]] = {"ostinato": [], peer: []}
    for number in range(workload.rounds):
        job = {"settings": settings, "workload": one_round, "round": number}
        report(f"round {number + 1}: ostinato")
        answers["ostinato"].append(ask("ostinato", job))
        effective = answers["ostinato"][0]["settings"]
        same = {name: effective[name] for name in ("dtype", "threads", "device")}
        report(f"round {number + 1}: {peer}")
        answers[peer].append(ask(peer, {**job, **same}))
    ours = answers["ostinato"][0]
    results = []
    for index, batch_size in enumerate(workload.batch_sizes):
        figures = {name: _figures(given, index) for name, given in answers.items()}
        ratio = {rate: _ratio(figures["ostinato"][rate], figures[peer][rate]) for rate in RATES}
        results.append({"batch_size": batch_size, **figures, "ratio": ratio})
    return {
        "command": "throughput",
        "compare": {"peer": peer, "version": answers[peer][0]["version"]},
        "model": ours["model"],
        "settings": ours["settings"] | {"rounds": workload.rounds},
        "machine": ours["machine"],
        "results": results,
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Ostinato's part of a round, in this process: a trace per batch size, as plain data."""
    workload = workload_of(job)
    config = bench_config(job["settings"], workload)
    from ostinato.engine.engine import Engine

    engine = Engine(config)
    traces = [run_rounds(engine, workload, size, job["round"])[0] for size in workload.batch_sizes]
    return {
        "traces": [asdict(trace) for trace in traces],
        "model": model_facts(config, engine.plan),
        "settings": setting_facts(engine.plan, workload),
        "machine": machine_facts(engine.plan),
    }


def workload_of(job: dict[str, Any]) -> Workload:
    """The workload of a job, after its way through JSON."""
    return Workload(**{**job["workload"], "batch_sizes": tuple(job["workload"]["batch_sizes"])})


def _figures(answers: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    traces = [Trace(**answer["traces"][index]) for answer in answers]
    peak = max(answer["peak_memory_bytes"] for answer in answers)
    return {**throughput_figures(traces), "peak_memory_bytes": peak}


def _ratio(ours: dict[str, float] | None, theirs: dict[str, float] | None) -> float | None:
    return None if ours is None or theirs is None else ours["median"] / theirs["median"]
