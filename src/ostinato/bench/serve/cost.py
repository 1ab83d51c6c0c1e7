"""Processor time of each part of serving, per output token.

The parts are of the server's two processes, the load generator, and `LLM.generate` for comparison.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.bench.reports import Column, Table
from ostinato.bench.serve.sampler import ENGINE_PROCESS, GENERATOR, SERVER, Parts, Sampler
from ostinato.errors import ModelError

PROGRAM = "from ostinato.bench.serve.profiled import main; main()"
"""Program of a server whose processes report their processor time."""
PATIENCE = 30.0
"""Seconds that a process has to report its processor time."""
GENERATED = "LLM.generate"
PROCESSES = {ENGINE_PROCESS: "engine", SERVER: "server", "generator": "load generator", GENERATED: GENERATED}
"""Names of the processes in tables. The first three run at the same time."""
_LEAST = 0.005
"""Share of its process below which a part is no line of the table."""


@dataclass(frozen=True)
class Used:
    """Processor seconds of one process: in user mode, in the kernel, and by part.

    The parts are given for all threads and for the main one alone.
    """

    user: float
    system: float
    parts: Mapping[str, float]
    main_parts: Mapping[str, float]

    def since(self, before: Used) -> Used:
        """Return the difference to `previous_hidden`."""
        pairs = ((self.parts, before.parts), (self.main_parts, before.main_parts))
        parts, main_parts = ({name: now - was.get(name, 0.0) for name, now in later.items()} for later, was in pairs)
        return Used(self.user - before.user, self.system - before.system, parts, main_parts)


def used_here(sampler: Sampler) -> Used:
    """Return the processor time of this process."""
    of_all = resource.getrusage(resource.RUSAGE_SELF)
    return Used(of_all.ru_utime, of_all.ru_stime, dict(sampler.seconds), dict(sampler.main_seconds))


@contextmanager
def sampled(parts: Parts) -> Iterator[list[Used]]:
    """Profile this process; at the end the list has the processor time used meanwhile."""
    sampler = Sampler(parts)
    sampler.start()
    before, found = used_here(sampler), list[Used]()
    try:
        yield found
    finally:
        found.append(used_here(sampler).since(before))
        sampler.stop()


@contextmanager
def profiled(directory: Path) -> Iterator[dict[str, Used]]:
    """Profile the load generator, which is this process, and a server of `profiled.py` with that directory.

    At the end the mapping has the processor time that each process used meanwhile.
    """
    found: dict[str, Used] = {}
    names = (SERVER, ENGINE_PROCESS)
    before = {name: _told(directory, name) for name in names}
    with sampled(GENERATOR) as own:
        yield found
    found |= {name: _told(directory, name).since(before[name]) for name in names}
    found["generator"] = own[0]


def _told(directory: Path, name: str) -> Used:
    """Return the processor time that a process reports. Raises ModelError if it does not report in time."""
    file = directory / f"{name}.json"
    last = json.loads(file.read_text(encoding="utf-8"))
    os.kill(last["pid"], signal.SIGUSR1)
    deadline = time.monotonic() + PATIENCE
    while (report := json.loads(file.read_text(encoding="utf-8")))["told"] == last["told"]:
        if time.monotonic() > deadline:
            raise ModelError(f"the {PROCESSES[name]}'s process does not tell what it has used")
        time.sleep(0.005)
    return Used(**report["used"])


def cost_figures(rounds: Sequence[Mapping[str, Used]], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the processor microseconds per output token of all rounds together, by process and part.

    `tokens`: by process, of all rounds.
    """
    figures = {}
    for name in PROCESSES:
        used = [each[name] for each in rounds]
        scale = 1e6 / tokens[name]
        figures[name] = {
            "user": scale * sum(each.user for each in used),
            "system": scale * sum(each.system for each in used),
            "parts": _summed([each.parts for each in used], scale),
            "main_parts": _summed([each.main_parts for each in used], scale),
        }
    return figures


def _summed(parts: Sequence[Mapping[str, float]], scale: float) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: scale * sum(each.get(name, 0.0) for each in parts) for name in names}


def cost_tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return tables of the processes with their parts, the most expensive first."""
    rows = []
    for name, title in PROCESSES.items():
        of_process = figures[name]
        whole = of_process["user"] + of_process["system"]
        rows.append({"process": title, "part": "", "us": whole, "main": None, **of_process})
        for part, us in sorted(of_process["parts"].items(), key=lambda each: -each[1]):
            if us >= _LEAST * whole:
                main = of_process["main_parts"].get(part, 0.0)
                rows.append({"process": title, "part": part, "us": us, "main": main, "user": None, "system": None})
    columns = (
        Column("process", "process", is_text=True),
        Column("part", "part", is_text=True),
        Column("us per token", "us", "{:.1f}", help="of the processor, all threads"),
        Column("main thread", "main", "{:.1f}"),
        Column("user", "user", "{:.1f}"),
        Column("kernel", "system", "{:.1f}"),
    )
    return [Table(columns, rows, "where the processor's time goes")]
