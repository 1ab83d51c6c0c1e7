"""What of the processor each part of serving takes, per output token: the server's two processes, the load generator,
and `LLM.generate` beside them."""

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
"""A server whose processes tell what they use."""
PATIENCE = 30.0
"""Seconds that a process has to tell what it has used."""
GENERATED = "LLM.generate"
PROCESSES = {ENGINE_PROCESS: "engine", SERVER: "server", "generator": "load generator", GENERATED: GENERATED}
"""Their names in tables. The first three run at the same time."""
_LEAST = 0.005
"""The share of its process below which a part is no line of the table."""


@dataclass(frozen=True)
class Used:
    """Seconds of the processor of one process: in user mode, in the kernel, and by part, of all threads and of the main
    one alone."""

    user: float
    system: float
    parts: Mapping[str, float]
    main_parts: Mapping[str, float]

    def since(self, before: Used) -> Used:
        """What has come since then."""
        pairs = ((self.parts, before.parts), (self.main_parts, before.main_parts))
        parts, main_parts = ({name: now - was.get(name, 0.0) for name, now in later.items()} for later, was in pairs)
        return Used(self.user - before.user, self.system - before.system, parts, main_parts)


def used_here(sampler: Sampler) -> Used:
    """By this process."""
    of_all = resource.getrusage(resource.RUSAGE_SELF)
    return Used(of_all.ru_utime, of_all.ru_stime, dict(sampler.seconds), dict(sampler.main_seconds))


@contextmanager
def sampled(parts: Parts) -> Iterator[list[Used]]:
    """Profiles this process; at the end the list has what was used meanwhile."""
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
    """Profiles the load generator, which is this process, and a server of `profiled.py` with that directory; at the end
    the mapping has what each process used meanwhile."""
    found: dict[str, Used] = {}
    names = (SERVER, ENGINE_PROCESS)
    before = {name: _told(directory, name) for name in names}
    with sampled(GENERATOR) as own:
        yield found
    found |= {name: _told(directory, name).since(before[name]) for name in names}
    found["generator"] = own[0]


def _told(directory: Path, name: str) -> Used:
    """What a process says that it has used so far. ModelError if it does not say so in time."""
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
    """Microseconds of the processor per output token of all rounds together, by process and part. `tokens`: by process,
    of all rounds."""
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
    """Processes with their parts, the dearest first."""
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
