"""The check of a GPU: part after part within its budget, whatever fails on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ostinato.bench.gpu.compiling import compiled
from ostinato.bench.gpu.parts import CheckPart
from ostinato.bench.gpu.process import run_within
from ostinato.bench.gpu.pytest_run import figures_of_tests, pytest_command, why_not
from ostinato.bench.reports import ProgressCallback
from ostinato.bench.worker import COMMAND, request_of, result_of
from ostinato.config import EngineConfig
from ostinato.errors import OstinatoError

TAIL = 4000
"""Characters of a failure's traceback that are kept."""


@dataclass(frozen=True)
class PartOutcome:
    """Outcome of a part: `data` if it did its work (also if some of its tests failed), else `reason`."""

    part: CheckPart
    outcome: Literal["ok", "failed", "timed out", "skipped"]
    seconds: float
    limit: float
    reason: str | None = None
    data: dict[str, Any] | None = None
    trace: str | None = None
    """The end of a failed process's error output."""

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "part"}
        return {**asdict(self.part), "planned_seconds": self.part.seconds, **own}


Measure = Callable[[CheckPart, float], PartOutcome]
"""Function that runs a part within a number of seconds."""


def run_parts(
    parts: Sequence[CheckPart],
    budget: float,
    measure: Measure,
    say: ProgressCallback,
    done: Callable[[Sequence[PartOutcome]], object] = lambda outcomes: None,
) -> list[PartOutcome]:
    """Run every part that the rest of the `budget` (seconds) holds, in order.

    A part may take its own seconds, and what the parts before it have left of theirs. `done` is called after each, so
    that nothing is lost if a later part fails.
    """
    begin = time.monotonic()
    outcomes: list[PartOutcome] = []
    for number, part in enumerate(parts):
        left = budget - (time.monotonic() - begin)
        limit = limit_of(parts[number:], left)
        if part.needs_setting is not None and part.needs_setting not in EngineConfig.model_fields:
            reason = f"this version has no setting {part.needs_setting}"
            outcomes.append(PartOutcome(part, "skipped", 0.0, 0.0, reason))
        elif limit is None:
            reason = f"it is planned to take {part.seconds:.0f} s, and {max(left, 0):.0f} s of the budget are left"
            outcomes.append(PartOutcome(part, "skipped", 0.0, 0.0, reason))
        else:
            say(f"{part.title} (at most {limit:.0f} s)")
            outcomes.append(measure(part, limit))
        last = outcomes[-1]
        say(f"{part.name}: {last.outcome} after {last.seconds:.0f} s{f': {last.reason}' if last.reason else ''}")
        done(outcomes)
    return outcomes


def limit_of(parts: Sequence[CheckPart], left: float) -> float | None:
    """Return the seconds that the first of `parts` may take if all of them have `left`; None if that is too few."""
    first, *later = parts
    if first.seconds > left:
        return None
    return max(first.seconds, left - sum(part.seconds for part in later))


def measure_apart(part: CheckPart, limit: float, checkout: Path) -> PartOutcome:
    """Run a part in a separate process. Tests run, and kernels are compiled, in the `checkout`."""
    if part.kind == "tests":
        return _run_tests(part, limit, checkout)
    if part.kind == "compile":
        return _compile(part, limit, checkout)
    finished = run_within(COMMAND, limit, request_of("gpu", {"part": asdict(part)}))
    times = (finished.seconds, limit)
    if finished.status is None:
        return PartOutcome(part, "timed out", *times, f"ended after {limit:.0f} s", trace=finished.errors[-TAIL:])
    if finished.status:
        reason = f"status {finished.status}: {finished.last_error}"
        return PartOutcome(part, "failed", *times, reason, trace=finished.errors[-TAIL:])
    try:
        return PartOutcome(part, "ok", *times, data=result_of(finished.output)["data"])
    except OstinatoError as error:
        return PartOutcome(part, "failed", *times, f"{type(error).__name__}: {error.message}")
    except (json.JSONDecodeError, LookupError) as error:
        return PartOutcome(part, "failed", *times, f"its answer cannot be read: {error}", trace=finished.output[-TAIL:])


def _run_tests(part: CheckPart, limit: float, checkout: Path) -> PartOutcome:
    finished = run_within(pytest_command(part.options), limit, directory=checkout)
    data = figures_of_tests(finished)
    reason = why_not(finished, data)
    outcome: Literal["ok", "failed", "timed out"] = "ok" if reason is None else "failed"
    if finished.status is None:
        outcome = "timed out"
    trace = None if reason is None else (finished.output + finished.errors)[-TAIL:]
    return PartOutcome(part, outcome, finished.seconds, limit, reason, data, trace)


def _compile(part: CheckPart, limit: float, checkout: Path) -> PartOutcome:
    if find_spec("triton") is None:
        return PartOutcome(part, "skipped", 0.0, limit, "Triton is not installed")
    finished, data = compiled(part.options["arguments"], limit, checkout)
    if finished.status is None:
        reason = f"ended after {limit:.0f} s; what is missing is compiled when it is needed"
        return PartOutcome(part, "timed out", finished.seconds, limit, reason, trace=finished.errors[-TAIL:])
    if finished.status == 0:
        return PartOutcome(part, "ok", finished.seconds, limit, data=data)
    reason = f"{len(data['findings'])} launches with findings" if data else f"failed: {finished.last_error}"
    return PartOutcome(part, "failed", finished.seconds, limit, reason, data, (finished.output + finished.errors)[-TAIL:])
