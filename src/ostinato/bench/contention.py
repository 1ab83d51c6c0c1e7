"""Speed beside other busy processes, over the speed alone: what an engine loses on a machine that it shares."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from ostinato.bench.engine_driver import WARM_UP_TOKENS, Workload, bench_config, rotated_order, run_batch
from ostinato.bench.report import (
    BenchReport,
    Column,
    ProgressCallback,
    Table,
    engine_facts,
    engine_lines,
    spread_columns,
)
from ostinato.bench.statistics import paired_ratio, spread
from ostinato.json_io import JsonObject
from ostinato.os_support import usable_cores
from ostinato.units import counted

CONTEXT = 32
"""Prompt tokens before each row that decodes."""
BUSY_CODE = """\
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000): pass
"""
"""Program of a busy process: it writes a line when it begins, and ends by itself when its parent has."""

COLUMNS = (
    Column("work", "work", is_text=True),
    Column("busy processes", "busy"),
    *spread_columns("tokens_per_second", "{:,.1f}"),
    Column("of quiet", "of_quiet.median", "{:.2f}", help="the median over rounds of its speed over the quiet one"),
    Column("fair share", "fair_share", "{:.2f}", help="cores / (cores + busy processes)"),
    Column("of the share", "of_fair_share", "{:.2f}"),
)


@dataclass(frozen=True)
class ContentionBench:
    """Batches that decode and a prompt, measured beside each number of busy processes in every round."""

    batch_sizes: tuple[int, ...]
    prompt_len: int
    output_len: int
    busy: tuple[int, ...]
    """Numbers of busy processes, beside none."""
    rounds: int

    @property
    def workloads(self) -> dict[str, Workload]:
        """Measured work by its name."""
        decode = {
            f"decode, {counted(size, 'row')}": Workload(CONTEXT, self.output_len, (size,), self.rounds)
            for size in self.batch_sizes
        }
        return {**decode, f"prompt of {self.prompt_len}": Workload(self.prompt_len, 1, (1,), self.rounds)}


def contention(settings: JsonObject, bench: ContentionBench, say: ProgressCallback) -> BenchReport:
    """Measure each workload quiet and beside busy processes, in turns; `of_quiet` compares within one round."""
    from ostinato.engine.core import EngineCore

    most = Workload(max(CONTEXT, bench.prompt_len), bench.output_len, bench.batch_sizes, bench.rounds)
    config = bench_config(settings, most)
    engine = EngineCore(config)
    workloads, counts = bench.workloads, (0, *bench.busy)
    rates: dict[tuple[str, int], list[float]] = {(name, busy): [] for name in workloads for busy in counts}
    for name, workload in workloads.items():
        say(f"{name}: warming up")
        prompts = workload.prompts(workload.batch_sizes[0], engine.spec.vocab_size, -1)
        run_batch(engine, prompts, min(workload.output_len, WARM_UP_TOKENS))
    for number in range(bench.rounds):
        for busy in rotated_order(counts, number):
            say(f"round {number + 1}: {busy} busy beside it" if busy else f"round {number + 1}: quiet")
            with busy_processes(busy):
                for kind, (name, workload) in enumerate(workloads.items()):
                    # Other prompts in each, so that none finds its prefix cached.
                    seed = (number * len(counts) + counts.index(busy)) * len(workloads) + kind
                    prompts = workload.prompts(workload.batch_sizes[0], engine.spec.vocab_size, seed)
                    trace = run_batch(engine, prompts, workload.output_len)
                    is_decode = workload.output_len > 1
                    rates[name, busy].append(
                        trace.decode_rate if is_decode else trace.prompt_tokens / trace.prefill_end
                    )
    cores = usable_cores()
    results = [_figures(name, busy, cores, rates[name, busy], rates[name, 0]) for name, busy in rates]
    data = {**engine_facts("contention", config, engine.plan, **asdict(bench)), "results": results}
    data["machine"] |= {"cores": cores}
    return BenchReport(data, engine_lines(data, "{output_len} tokens decoded by each row"), [Table(COLUMNS, results)])


def _figures(work: str, busy: int, cores: int, rates: Sequence[float], quiet: Sequence[float]) -> JsonObject:
    share, of_quiet = cores / (cores + busy), paired_ratio(rates, quiet)
    assert of_quiet is not None, "the quiet speed is measured"
    return {
        "work": work,
        "busy": busy,
        "tokens_per_second": spread(rates),
        "of_quiet": of_quiet,
        "fair_share": share,
        "of_fair_share": of_quiet["median"] / share,
    }


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that compute without pause, each on any core that this one may use."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            # In this session: Linux may share cores by sessions before it shares them by processes.
            command = [sys.executable, "-I", "-S", "-c", BUSY_CODE]
            started.append(subprocess.Popen(command, env={}, stdout=subprocess.PIPE))
        for process in started:
            process.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()
