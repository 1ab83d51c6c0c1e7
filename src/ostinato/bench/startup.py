"""Start-up: from an empty process to the first token."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from ostinato.bench.drive import Workload, bench_config, plan_of, run_batch
from ostinato.bench.reports import (
    Column,
    Report,
    Say,
    Table,
    digits,
    engine_facts,
    engine_lines,
    run_facts,
    spread_columns,
)
from ostinato.bench.throughput import LENGTHS
from ostinato.bench.trace import spread
from ostinato.bench.worker import ask
from ostinato.units import format_bytes

PHASES = ("interpreter", "import", "plan", "load", "first_token", "total")
COLUMNS = (Column("seconds", "phase"), *spread_columns("seconds", digits(2)))


def startup(settings: dict[str, Any], workload: Workload, say: Say) -> Report:
    """Seconds of each phase, each round in a fresh process, as median, min and max.

    `interpreter` is Python itself, `import` is torch and the engine, `plan` the plan, `load` the tokenizer,
    the weights and the cache's memory, `first_token` the first request's prefill.
    """
    rounds = []
    for number in range(workload.rounds):
        say(f"round {number + 1}")
        rounds.append(ask("startup", {"settings": settings, "prompt_len": workload.prompt_len}))
    phases = {phase: spread([each["seconds"][phase] for each in rounds]) for phase in PHASES}
    peak = max(each["peak_memory_bytes"] for each in rounds)
    data = {**rounds[0]["facts"], **run_facts("startup")}
    data["settings"] |= {"rounds": workload.rounds}
    data["results"] = [{"rounds": workload.rounds, "seconds": phases, "peak_memory_bytes": peak}]
    rows = [{"phase": phase, "seconds": seconds} for phase, seconds in phases.items()]
    lines = {**engine_lines(data, LENGTHS), "peak memory": format_bytes(peak)}
    return Report(data, lines, [Table(COLUMNS, rows)])


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """One start-up in this process, which began at `began` and entered Python code at `entered`."""
    moments = [job["began"], job["entered"]]
    from ostinato.engine.engine import Engine

    moments.append(time.monotonic())
    workload = Workload(job["prompt_len"], output_len=1, batch_sizes=(1,), rounds=1)
    config = bench_config(job["settings"], workload)
    plan_of(config)
    moments.append(time.monotonic())
    engine = Engine(config)  # makes the plan once more, in milliseconds
    moments.append(time.monotonic())
    run_batch(engine, workload.prompts(1, engine.spec.vocab_size, 0), output_len=1)
    moments.append(time.monotonic())
    lengths = [after - before for before, after in pairwise(moments)]
    facts = engine_facts("startup", config, engine.plan, **asdict(workload))
    return {"seconds": dict(zip(PHASES, [*lengths, moments[-1] - moments[0]], strict=True)), "facts": facts}
