"""The tests marked `gpu`, in a separate process: pytest's command line, and statistics of its output."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ostinato.bench.gpu.process import Finished

MAX_FAILURES = 40
"""Most failures that a report lists, with a line each."""
ALONE = re.compile(r"^(?P<test>tests/.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b")
SHARED = re.compile(r"^\[gw\d+\].*? (?P<outcome>PASSED|FAILED|ERROR|SKIPPED) (?P<test>tests/.+?)\s*$")
"""Pytest's line for a test, alone and with several workers."""
REASON = re.compile(r"^(?:FAILED|ERROR) (?P<test>tests/.+?) - (?P<reason>.*)$")


def pytest_command(options: Mapping[str, Any]) -> list[str]:
    """Return pytest's command line. It asks for a line per test, so that a run that is ended early has results."""
    command = [sys.executable, "-u", "-m", "pytest", "-vv", "-m", "gpu", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    if options["workers"] and find_spec("xdist") is not None:
        command += ["-n", str(options["workers"])]
    return [*command, *options["arguments"]]


def figures_of_tests(finished: Finished) -> dict[str, Any]:
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


def why_not(finished: Finished, figures: Mapping[str, Any]) -> str | None:
    """Return the reason why the tests have not all passed; None if they have."""
    if figures["failed"]:
        return f"{figures['failed']} of {figures['failed'] + figures['passed']} tests failed"
    if finished.status is None:
        return f"ended after {finished.seconds:.0f} s; {figures['passed']} tests had passed"
    if finished.status or not figures["passed"]:
        last = next(iter(figures["tail"][-1:]), finished.last_error)
        return f"pytest ended with status {finished.status}: {last}"
    return None
