"""One measurement's process: what it printed and when, and the memory of all that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.2
POINTER = "See root cause above"
"""In lines of vLLM's that name no cause but point to the one that does."""


class PeerError(Exception):
    """An engine that could not do what was asked of it; the message is what it said."""


@dataclass(frozen=True)
class Finished:
    lines: list[str]
    """Of stdout, without those that are empty."""
    moments: list[float]
    """When each of them came, in seconds since the process was started."""
    peak_memory_bytes: int


def run(command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None, job: str = "") -> Finished:
    """Runs `command` with `job` on its stdin, and `env` added to the environment.

    PeerError, with the last line that the process said, if it fails or is not done after `timeout` seconds. Nothing
    that it started is left.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        watch = _Watch(process.pid, began + timeout)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(job)
            lines, moments = [], []
            for line in process.stdout:
                if line.strip():
                    lines.append(line.strip())
                    moments.append(time.monotonic() - began)
            process.wait()
        finally:
            watch.stop()
        if watch.is_late:
            raise PeerError(f"not done after {timeout:.0f} seconds")
        if process.returncode:
            said.seek(0)
            raise PeerError(reason([*lines, *said.read().splitlines()], process.returncode))
    # What the kernel itself notes of a child (ru_maxrss) begins with the size of the process that started it.
    return Finished(lines, moments, watch.peak)


def reason(said: Sequence[str], code: int) -> str:
    """The line that tells why: the last that names an error, or the last one."""
    said = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in said if line.strip()]
    errors = [line for line in said if re.search(r"(Error|Exception|error|failed)\b", line) and POINTER not in line]
    last = (errors or said or ["it said nothing"])[-1]
    return f"{last[:300]} (exit code {code})"


class _Watch(threading.Thread):
    """Samples the memory of a process and its descendants until told to stop, and ends them when their time is up."""

    def __init__(self, root: int, deadline: float) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.is_late = False
        self._root = root
        self._deadline = deadline
        self._is_done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._is_done.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, tree_memory(self._root))
            if time.monotonic() > self._deadline:
                self.is_late = True
                self._end()

    def stop(self) -> None:
        self._is_done.set()
        self.join()
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._root, signal.SIGKILL)


def busy_share(seconds: float = 0.5) -> float:
    """The share of all processors' time that went to any work in the next `seconds`."""
    before = _processor_ticks()
    time.sleep(seconds)
    after = _processor_ticks()
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return 1 - sum(spent[3:5]) / max(1, sum(spent))


def _processor_ticks() -> list[int]:
    """Since the system started: user, nice, system, idle, waiting for disks, and interrupts; see proc(5)."""
    with open("/proc/stat", encoding="ascii") as file:
        return [int(ticks) for ticks in file.readline().split()[1:9]]


def tree_memory(root: int) -> int:
    """Resident bytes of a process and its descendants: what is theirs alone, added up, and the files and shared memory
    of the one that has most of these, as they mostly map the same ones."""
    parents: dict[int, int] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            # A process may end at any time.
            with contextlib.suppress(OSError):
                text = (directory / "status").read_text(encoding="utf-8", errors="replace")
                fields = dict(re.findall(r"^(PPid|RssAnon|RssFile|RssShmem):\s+(\d+)", text, re.MULTILINE))
                parents[int(directory.name)] = int(fields.get("PPid", 0))
                shared = int(fields.get("RssFile", 0)) + int(fields.get("RssShmem", 0))
                sizes[int(directory.name)] = int(fields.get("RssAnon", 0)) * 1024, shared * 1024
    tree = _descendants(root, parents)
    counted = [sizes[process] for process in tree if process in sizes]
    return sum(own for own, _ in counted) + max((shared for _, shared in counted), default=0)


def _descendants(root: int, parents: Mapping[int, int]) -> set[int]:
    tree = {root}
    while more := {process for process, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree
