"""Sampling profiler of a process's processor time by part: frequent samples, at no cost between them."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from types import FrameType

INTERVAL = 0.001
"""Processor seconds between two samples, or a tick of the system's clock, whichever is more."""
OTHER = "all else"
SERVER, ENGINE_PROCESS = "server", "engine"
"""Names of a server's processes."""

Parts = Sequence[tuple[str, Sequence[str]]]
"""Parts, each with patterns for its code; the first pattern that fits names a frame.

A pattern is the end of a file's name, a folder (`sample/`), or a function of a file (`gate.py:send`).
"""

ENGINE: Parts = (
    ("requests that begin", ("engine.py:add", "child.py:_add", "child.py:_take")),
    ("scheduler and prefix cache", ("schedule/", "/cache/")),
    ("inputs of the step", ("engine/run/inputs.py",)),
    ("logits", ("runner.py:project", "base.py:logits")),
    ("model", ("/graphs/", "/layers/", "runner.py:forward", "runner.py:_compute")),
    ("sampling", ("/sample/",)),
    ("text of the tokens", ("engine/text/",)),
    ("outputs and counts", ("engine/generation.py", "engine/unfinished.py", "engine/outputs.py", "/observe/")),
    ("gains", ("process/delivery.py", "child.py:_sendable")),
    ("pipe and pickles", ("process/messages.py",)),
    ("loop", ("engine/steps.py", "engine/engine.py", "process/child.py", "engine/turns.py", "engine/llm.py")),
)
FRONT: Parts = (
    ("pipe and pickles", ("process/messages.py", "process/launch.py")),
    ("writes to sockets", ("connection.py:write",)),
    (
        "gains to their streams",
        ("process/streams.py", "process/stream.py", "process/delivery.py", "async_engine.py:_take"),
    ),
    ("chunks", ("completions.py:_events", "completions.py:_streamed", "completions.py:_choice", "api/answers.py")),
    ("HTTP", ("http/exchange.py", "http/streaming.py", "http/connection.py", "gate.py:send_noted")),
    ("requests that begin and end", ("/serve/", "/observe/", "engine/text/", "engine/process/", "pydantic/")),
)
GENERATOR: Parts = (
    ("events and JSON", ("serve/reply.py",)),
    ("HTTP", ("serve/http_client.py",)),
    ("requests", ("serve/sending.py",)),
)


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
