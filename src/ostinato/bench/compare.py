"""Throughput beside another engine, in turns on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from ostinato.bench.drive import bench_config, run_batch, with_room
from ostinato.bench.facts import machine_facts, model_facts
from ostinato.bench.trace import Trace, throughput_figures
from ostinato.bench.worker import ask
from ostinato.bench.workload import Workload
from ostinato.errors import ConfigError
from ostinato.models.checkpoint import load_spec
from ostinato.plain_data import to_plain

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
    vocab_size = load_spec(bench_config(settings, workload)).vocab_size
    answers: dict[str, list[dict[str, Any]]] = {"ostinato": [], peer: []}
    for number in range(workload.rounds):
        job = {"settings": settings, "batches": _batches(workload, vocab_size, number)}
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
        "settings": ours["settings"] | asdict(workload),
        "machine": ours["machine"],
        "results": results,
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Ostinato's part of a round, in this process: a trace of each of the job's batches, one after the other.

    A batch has `prompts`, lists of token ids, and `output_len`. `startup_seconds` is the time from `began` until the
    first batch was answered: the start-up to the first token, if that batch is one prompt and one token of output.
    """
    batches = job["batches"]
    config = with_room(
        job["settings"],
        max_num_seqs=max(len(batch["prompts"]) for batch in batches),
        max_model_len=max(len(batch["prompts"][0]) + batch["output_len"] for batch in batches),
    )
    from ostinato.engine.engine import Engine

    engine = Engine(config)
    traces, ends = [], []
    for batch in batches:
        traces.append(run_batch(engine, batch["prompts"], batch["output_len"]))
        ends.append(time.monotonic())
    return {
        "traces": [asdict(trace) for trace in traces],
        "startup_seconds": ends[0] - job["began"],
        "model": model_facts(config, engine.plan),
        "settings": to_plain(engine.plan.settings),
        "machine": machine_facts(engine.plan),
    }


def _batches(workload: Workload, vocab_size: int, number: int) -> list[dict[str, Any]]:
    """Those of one round: for each batch size one to warm up, and one that is counted."""
    batches = []
    for size in workload.batch_sizes:
        for turn, output_len in ((-1, workload.warm_up().output_len), (number, workload.output_len)):
            batches.append({"prompts": workload.prompts(size, vocab_size, turn), "output_len": output_len})
    return batches


def _figures(answers: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    traces = [Trace(**answer["traces"][1::2][index]) for answer in answers]
    peak = max(answer["peak_memory_bytes"] for answer in answers)
    return {**throughput_figures(traces), "peak_memory_bytes": peak}


def _ratio(ours: dict[str, float] | None, theirs: dict[str, float] | None) -> float | None:
    return None if ours is None or theirs is None else ours["median"] / theirs["median"]
