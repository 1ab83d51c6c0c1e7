"""Processor time of each part of serving, per output token.

The parts are those of the server's two processes, the load generator, and `LLM.generate` for comparison. A sampling
profiler takes frequent samples in each process, at no cost between them.

The profiled server runs from `main`, which reads a job from stdin (JSON: `settings`, `port`, `directory`) and serves
until SIGTERM. Each process has a file in the directory, and writes its processor time to it when SIGUSR1 comes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ostinato.bench.report import Column, Table
from ostinato.config import EngineConfig
from ostinato.engine.process.engine_process import make_engine
from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.observe.counts import ProgressFn, no_progress
from ostinato.serve.server import serve
from ostinato.serve.settings import ServeSettings

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore


INTERVAL = 0.001
"""Processor seconds between two samples, or a tick of the system's clock, whichever is more."""
OTHER = "all else"
SERVER, ENGINE_PROCESS = "server", "engine"
"""Names of a server's processes."""

Parts = Sequence[tuple[str, Sequence[str]]]
"""Parts, each with patterns for its code; the first pattern that fits names a frame.

A pattern is the end of a file's name, a folder (`/sampling/`), or a function of a file (`child.py:_add`).
"""

ENGINE: Parts = (
    ("requests that begin", ("core.py:add_request", "input_processor.py", "child.py:_add", "child.py:_handle")),
    ("scheduler and prefix cache", ("/scheduler/", "/kv_cache/")),
    ("inputs of the step", ("runner/inputs.py",)),
    ("logits", ("runner/step_logits.py", "base.py:compute_logits")),
    ("model", ("/graphs/", "/layers/", "model_runner.py:execute_model")),
    ("sampling", ("/sampling/",)),
    ("text of the tokens", ("engine/text/",)),
    ("outputs and counts", ("engine/output_processor.py", "engine/outputs.py", "/observe/")),
    ("deltas", ("process/output_deltas.py", "child.py:_sendable")),
    ("pipe and pickles", ("process/engine_messages.py",)),
    ("loop", ("engine/core.py", "engine/executor.py", "process/child.py", "engine/shared_engine.py", "engine/llm.py")),
)
FRONT: Parts = (
    ("pipe and pickles", ("process/engine_messages.py", "process/engine_process.py")),
    ("writes to sockets", ("connection.py:write",)),
    (
        "deltas to their streams",
        ("process/request_streams.py", "process/output_deltas.py", "async_engine.py:_handle_message"),
    ),
    (
        "chunks",
        ("completions.py:_events", "completions.py:_streamed", "completions.py:_choice", "api/generation_run.py"),
    ),
    ("HTTP", ("http/request_cycle.py", "http/streaming.py", "http/connection.py", "middleware.py:send_noted")),
    ("requests that begin and end", ("/serve/", "/observe/", "engine/text/", "engine/process/", "pydantic/")),
)
GENERATOR: Parts = (("HTTP and events", ("serve/load_client.py",)), ("requests", ("serve/load_generator.py",)))


class Sampler:
    """Profiler of this process's processor time. Used on the main thread, one at a time.

    A signal comes after each `INTERVAL` of processor time. The time since the last sample belongs to what the main
    thread does then; so a call into C that takes long counts as a whole, with the threads that work for it meanwhile.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.seconds: dict[str, float] = defaultdict(float)
        """Processor seconds by part, of all threads."""
        self.main_seconds: dict[str, float] = defaultdict(float)
        """Processor seconds by part, of the main thread."""
        self._last = self._last_of_main = 0.0

    def start(self) -> None:
        self._last, self._last_of_main = time.process_time(), time.thread_time()
        signal.signal(signal.SIGPROF, self._look)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # a signal may be pending

    def _look(self, _: int, frame: FrameType | None) -> None:
        now, now_of_main = time.process_time(), time.thread_time()
        part = part_of(frame, self._parts)
        self.seconds[part] += now - self._last
        self.main_seconds[part] += now_of_main - self._last_of_main
        self._last, self._last_of_main = now, now_of_main


def part_of(frame: FrameType | None, parts: Parts) -> str:
    """Return the part of the innermost frame that belongs to one."""
    while frame is not None:
        code = frame.f_code
        part = _part_of_code(code.co_filename, code.co_name, parts)
        if part is not None:
            return part
        frame = frame.f_back
    return OTHER


def _part_of_code(file: str, function: str, parts: Parts) -> str | None:
    for part, places in parts:
        for place in places:
            name, _, of_file = place.partition(":")
            if (not of_file or function == of_file) and (name in file if name.endswith("/") else file.endswith(name)):
                return part
    return None


PROGRAM = "from ostinato.bench.serve.cpu_profile import main; main()"
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
        """Return the difference to `before`."""
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
    before, used = used_here(sampler), list[Used]()
    try:
        yield used
    finally:
        used.append(used_here(sampler).since(before))
        sampler.stop()


@contextmanager
def profiled(directory: Path) -> Iterator[dict[str, Used]]:
    """Profile the load generator, which is this process, and a server of `main` with that directory.

    At the end the mapping has the processor time that each process used meanwhile.
    """
    used: dict[str, Used] = {}
    names = (SERVER, ENGINE_PROCESS)
    before = {name: _told(directory, name) for name in names}
    with sampled(GENERATOR) as generator:
        yield used
    used |= {name: _told(directory, name).since(before[name]) for name in names}
    used["generator"] = generator[0]


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


def cost_figures(rounds: Sequence[Mapping[str, Used]], tokens: Mapping[str, int]) -> JsonObject:
    """Return the processor microseconds per output token by process and part; `tokens` are those of all rounds."""
    figures = {}
    for name in PROCESSES:
        used = [uses[name] for uses in rounds]
        scale = 1e6 / tokens[name]
        figures[name] = {
            "user": scale * sum(process.user for process in used),
            "system": scale * sum(process.system for process in used),
            "parts": _summed([process.parts for process in used], scale),
            "main_parts": _summed([process.main_parts for process in used], scale),
        }
    return figures


def _summed(parts: Sequence[Mapping[str, float]], scale: float) -> dict[str, float]:
    names = dict.fromkeys(name for seconds_by_part in parts for name in seconds_by_part)
    return {name: scale * sum(seconds_by_part.get(name, 0.0) for seconds_by_part in parts) for name in names}


def cost_tables(figures: JsonMapping) -> list[Table]:
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


@dataclass(frozen=True)
class ProfiledEngine:
    """Maker of an engine in its process, with a profile of that process."""

    directory: str

    def __call__(self, config: EngineConfig, progress: ProgressFn) -> EngineCore:
        engine = make_engine(config, progress)
        tell(Sampler(ENGINE), Path(self.directory), ENGINE_PROCESS)
        return engine


def tell(sampler: Sampler, directory: Path, name: str) -> None:
    """Start a sampler, have this process write its processor time on SIGUSR1, and report at once that it runs."""
    told = 0

    def write(*_: object) -> None:
        nonlocal told
        told += 1
        report = {"pid": os.getpid(), "told": told, "used": asdict(used_here(sampler))}
        written = directory / f"{name}.part"
        written.write_text(json.dumps(report), encoding="utf-8")
        written.replace(directory / f"{name}.json")

    signal.signal(signal.SIGUSR1, write)
    sampler.start()
    write()


def main() -> None:
    job = json.loads(sys.stdin.read())
    directory = Path(job["directory"])
    sampler = Sampler(FRONT)
    tell(sampler, directory, SERVER)
    try:
        status = serve(
            EngineConfig(**job["settings"]),
            ServeSettings(port=job["port"]),
            no_progress,
            lambda url: None,
            make=ProfiledEngine(str(directory)),
        )
    finally:
        sampler.stop()
    sys.exit(status)
