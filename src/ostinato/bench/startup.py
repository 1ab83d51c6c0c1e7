"""Start-up: from an empty process to the first token."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ostinato.bench.drive import bench_config, run_batch
from ostinato.bench.facts import machine_facts, model_facts, setting_facts
from ostinato.bench.trace import spread
from ostinato.bench.worker import ask
from ostinato.bench.workload import Workload

PHASES = ("interpreter", "import", "plan", "load", "first_token", "total")


def startup(settings: dict[str, Any], workload: Workload, report: Callable[[str], None]) -> dict[str, Any]:
    """The report: seconds of each phase, each round in a fresh process, as median, min and max.

    `interpreter` is Python itself, `import` is torch and the engine, `plan` the plan, `load` the tokenizer,
    the weights and the cache's memory, `first_token` the first request's prefill.
    """
    rounds = []
    for number in range(workload.rounds):
        report(f"round {number + 1}")
        rounds.append(ask("startup", {"settings": settings, "prompt_len": workload.prompt_len}))
    phases = {phase: spread([each["seconds"][phase] for each in rounds]) for phase in PHASES}
    peak = max(each["peak_memory_bytes"] for each in rounds)
    return {
        "command": "startup",
        "model": rounds[0]["model"],
        "settings": rounds[0]["settings"] | {"rounds": workload.rounds},
        "machine": rounds[0]["machine"],
        "results": [{"rounds": workload.rounds, "seconds": phases, "peak_memory_bytes": peak}],
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One start-up in this process, which began at `began` and entered Python code at `entered`."""
    moments = [job["began"], job["entered"]]
    from ostinato.engine.engine import Engine

    moments.append(time.monotonic())
    from ostinato.models.checkpoint import load_spec
    from ostinato.plan.device.detect import detect
    from ostinato.plan.plan import make_plan

    workload = Workload(job["prompt_len"], output_len=1, batch_sizes=(1,), rounds=1)
    config = bench_config(job["settings"], workload)
    spec = load_spec(config)
    make_plan(config, spec, detect(config.device))
    moments.append(time.monotonic())
    engine = Engine(config)  # makes the plan once more, in milliseconds
    moments.append(time.monotonic())
    run_batch(engine, workload.prompts(1, spec.vocab_size, 0), output_len=1)
    moments.append(time.monotonic())
    lengths = [after - before for before, after in pairwise(moments)]
    return {
        "seconds": dict(zip(PHASES, [*lengths, moments[-1] - moments[0]], strict=True)),
        "model": model_facts(config, engine.plan),
        "settings": setting_facts(engine.plan, workload),
        "machine": machine_facts(engine.plan),
    }
