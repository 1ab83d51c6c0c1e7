"""Runner of a GPU check: check after check within its budget, whatever fails on the way.

Each check runs in a process with a time limit, which ends with all processes that it started. Before the measurements,
all cores compile the kernels that the engines will start into Triton's cache: an engine compiles them one by one, a
second each. Tests run in a separate process too, and their output is counted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from ostinato.bench.engine_driver import COMMAND, request_of, result_of
from ostinato.bench.gpu.parts import Check
from ostinato.bench.report import ProgressCallback
from ostinato.errors import OstinatoError
from ostinato.files import exists
from ostinato.json_io import JsonMapping, JsonObject


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


TOOL = "tools/check_triton.py"


def compiled(arguments: Sequence[str], seconds: float, checkout: Path) -> tuple[Finished, JsonObject | None]:
    """Run the tool of the `checkout`; return its process, and the tool's report if it has written one."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [sys.executable, TOOL, *arguments, "--output", str(path)]
        finished = run_within(command, seconds, directory=checkout)
        return finished, json.loads(path.read_text(encoding="utf-8")) if exists(path) else None


MAX_FAILURES = 40
"""Most failures that a report lists, with a line each."""
ALONE = re.compile(r"^(?P<test>tests/.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b")
SHARED = re.compile(r"^\[gw\d+\].*? (?P<outcome>PASSED|FAILED|ERROR|SKIPPED) (?P<test>tests/.+?)\s*$")
"""Pytest's line for a test, alone and with several workers."""
REASON = re.compile(r"^(?:FAILED|ERROR) (?P<test>tests/.+?) - (?P<reason>.*)$")


def pytest_command(options: JsonMapping) -> list[str]:
    """Return pytest's command line. It asks for a line per test, so that a run that is ended early has results."""
    command = [sys.executable, "-u", "-m", "pytest", "-vv", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    if options["workers"] and find_spec("xdist") is not None:
        command += ["-n", str(options["workers"])]
    return [*command, *options["arguments"]]


def figures_of_tests(finished: Finished) -> JsonObject:
    """Return how many tests passed, failed and were skipped, and the reasons of the failures.

    Counts that a run did not report because it was ended early are None.
    """
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for line in finished.output.splitlines():
        told = ALONE.match(line) or SHARED.match(line)
        if told is not None:
            outcomes[told["test"]] = told["outcome"]
        elif (why := REASON.match(line)) is not None:
            reasons[why["test"]] = why["reason"]
    counts = Counter(outcomes.values())
    failed = [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    return {
        "passed": counts["PASSED"],
        "failed": len(failed),
        "skipped": counts["SKIPPED"],
        "failures": [{"test": test, "reason": reasons.get(test)} for test in failed[:MAX_FAILURES]],
        "tail": finished.output.splitlines()[-3:],
    }


def why_not(finished: Finished, figures: JsonMapping) -> str | None:
    """Return the reason why the tests have not all passed; None if they have."""
    if figures["failed"]:
        return f"{figures['failed']} of {figures['failed'] + figures['passed']} tests failed"
    if finished.status is None:
        return f"ended after {finished.seconds:.0f} s; {figures['passed']} tests had passed"
    if finished.status or not figures["passed"]:
        last = next(iter(figures["tail"][-1:]), finished.last_error)
        return f"pytest ended with status {finished.status}: {last}"
    return None


TAIL = 4000
"""Characters of a failure's traceback that are kept."""


Outcome = Literal["ok", "failed", "timed out", "skipped"]


@dataclass(frozen=True)
class CheckOutcome:
    """Outcome of a check: `ok` if it ran to its end and nothing is wrong, else there is a `reason`.

    `data` are its measurements, or those up to a failure.
    """

    check: Check
    outcome: Outcome
    seconds: float
    limit: float
    reason: str | None = None
    data: JsonObject | None = None
    trace: str | None = None
    """The end of a failed process's error output."""

    def to_json(self) -> JsonObject:
        own = {name: value for name, value in vars(self).items() if name != "check"}
        return {**asdict(self.check), "planned_seconds": self.check.seconds, **own}


Measure = Callable[[Check, float], CheckOutcome]
"""Function that runs a check within a number of seconds."""


def run_checks(
    checks: Sequence[Check],
    budget: float,
    measure: Measure,
    say: ProgressCallback,
    done: Callable[[Sequence[CheckOutcome]], object] = lambda outcomes: None,
) -> list[CheckOutcome]:
    """Run every check that the rest of the `budget` (seconds) holds, in order.

    A check may take its own seconds, and what those before it have left of theirs. `done` is called after each, so that
    nothing is lost if a later one fails.
    """
    begin = time.monotonic()
    outcomes: list[CheckOutcome] = []
    for number, check in enumerate(checks):
        left = budget - (time.monotonic() - begin)
        limit = limit_of(checks[number:], left)
        if limit is None:
            reason = f"it is planned to take {check.seconds:.0f} s, and {max(left, 0):.0f} s of the budget are left"
            outcomes.append(CheckOutcome(check, "skipped", 0.0, 0.0, reason))
        else:
            say(f"{check.part}: {check.title} (at most {limit:.0f} s)")
            outcomes.append(measure(check, limit))
        last = outcomes[-1]
        say(f"{check.name}: {last.outcome} after {last.seconds:.0f} s{f': {last.reason}' if last.reason else ''}")
        done(outcomes)
    return outcomes


def limit_of(checks: Sequence[Check], left: float) -> float | None:
    """Return the seconds that the first of `checks` may take if all of them have `left`; None if that is too few."""
    first, *later = checks
    if first.seconds > left:
        return None
    return max(first.seconds, left - sum(check.seconds for check in later))


def measure_apart(check: Check, limit: float, checkout: Path, command: Sequence[str] = COMMAND) -> CheckOutcome:
    """Run a check in a separate process: tests and the compiler in the `checkout`, others by `command`."""
    if check.kind == "tests":
        return _run_tests(check, limit, checkout)
    if check.kind == "compile":
        return _compile(check, limit, checkout)
    finished = run_within(command, limit, request_of("gpu", {"check": asdict(check)}))
    return outcome_of(check, finished, limit)


def outcome_of(check: Check, finished: Finished, limit: float) -> CheckOutcome:
    """Judge a check's process by its status and its last line; of one that did not end, what it kept is kept."""
    times, trace, missing = (finished.seconds, limit), finished.errors[-TAIL:], None
    if finished.status != 0:
        data = last_data(finished.output)
        is_late = finished.status is None
        reason = f"ended after {limit:.0f} s" if is_late else f"status {finished.status}: {finished.last_error}"
        if data is None or not data.get("is_whole"):
            return CheckOutcome(check, "timed out" if is_late else "failed", *times, reason, data, trace)
        missing = f"all of ours was measured; other projects' kernels were not: {reason}"
    else:
        try:
            data = result_of(finished.output)["data"]
        except OstinatoError as error:
            return CheckOutcome(check, "failed", *times, f"{type(error).__name__}: {error.message}", trace=trace)
        except (json.JSONDecodeError, LookupError) as error:
            reason = f"its answer cannot be read: {error}"
            return CheckOutcome(check, "failed", *times, reason, trace=finished.output[-TAIL:])
    faults = data.get("faults")
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        return CheckOutcome(check, "failed", *times, f"{faults[0]}{more}", data, trace)
    return CheckOutcome(check, "ok", *times, missing, data)


def last_data(output: str) -> JsonObject | None:
    """Return the data of the last whole line that has some."""
    for line in reversed(output.splitlines()):
        with suppress(json.JSONDecodeError, LookupError, TypeError):
            data: JsonObject = json.loads(line)["data"]
            return data
    return None


def _run_tests(check: Check, limit: float, checkout: Path) -> CheckOutcome:
    finished = run_within(pytest_command(check.options), limit, directory=checkout)
    data = figures_of_tests(finished)
    reason = why_not(finished, data)
    outcome: Outcome = "ok" if reason is None else "failed"
    if finished.status is None:
        outcome = "timed out"
    trace = None if reason is None else (finished.output + finished.errors)[-TAIL:]
    return CheckOutcome(check, outcome, finished.seconds, limit, reason, data, trace)


def _compile(check: Check, limit: float, checkout: Path) -> CheckOutcome:
    if find_spec("triton") is None:
        return CheckOutcome(check, "skipped", 0.0, limit, "Triton is not installed")
    finished, data = compiled(check.options["arguments"], limit, checkout)
    if finished.status is None:
        reason = f"ended after {limit:.0f} s; what is missing is compiled when it is needed"
        return CheckOutcome(check, "timed out", finished.seconds, limit, reason, trace=finished.errors[-TAIL:])
    if finished.status == 0:
        return CheckOutcome(check, "ok", finished.seconds, limit, data=data)
    reason = f"{len(data['findings'])} launches with findings" if data else f"failed: {finished.last_error}"
    return CheckOutcome(
        check, "failed", finished.seconds, limit, reason, data, (finished.output + finished.errors)[-TAIL:]
    )
