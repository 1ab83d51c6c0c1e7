"""A process with a time limit, which also ends all processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """A finished process. `status` is None if it took too long and was ended; `output` is what it wrote until then."""

    status: int | None
    output: str
    errors: str
    seconds: float

    @property
    def last_error(self) -> str:
        """The last line of its errors, in which Python names the error."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it wrote no reason"


def run_within(command: Sequence[str], seconds: float, text: str = "", directory: Path | None = None) -> Finished:
    """Run `command` with `text` as its input. After `seconds` it is killed, with all processes that it has started."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        start_new_session=True,
    )
    status: int | None
    try:
        output, errors = process.communicate(text, timeout=max(seconds, 0))
        status = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        output, errors = process.communicate()
        status = None
    except BaseException:  # an interrupt, too, must leave nothing on the device
        _end(process)
        process.wait()
        raise
    return Finished(status, output, errors, time.monotonic() - begin)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
