"""Traces of steps in Chrome's trace event format, which Perfetto and chrome://tracing show.

The format is JSON with a list of events; each call is a complete event ("ph": "X") with its start and duration in
microseconds (Trace Event Format, Google).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.bench.statistics import Calls
from ostinato.errors import ConfigError
from ostinato.files import is_directory, why_unwritable

_PROCESS = 1


def trace_of(steps: Mapping[str, Calls], process: str) -> dict[str, Any]:
    """Return the trace of `steps`, calls by the name of a step, as plain data. Each step is a track of its own.

    The calls of a step follow each other without gaps, from time 0 on: their times are measured, the time between them
    is not.
    """
    events = [_name("process_name", process, 0)]
    for track, (step, calls) in enumerate(steps.items(), start=1):
        events.append(_name("thread_name", step, track))
        begin = 0.0
        for place, (operation, seconds) in enumerate(calls):
            duration = seconds * 1e6
            place_and_time = {"pid": _PROCESS, "tid": track, "ts": begin, "dur": duration}
            events.append({"name": operation, "cat": "operation", "ph": "X", **place_and_time, "args": {"call": place}})
            begin += duration
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, name: str, track: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}


def check_trace_path(path: Path) -> None:
    """Raise ConfigError if no trace could be written to `path`; to be called before anything is measured."""
    if is_directory(path) or not is_directory(path.parent):
        raise ConfigError(f"--trace {path} should be a file in a directory that exists")


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write the trace as JSON. ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {path}: {why_unwritable(path, error)}") from None
