"""`ostinato gpu-check`: everything that only a GPU can show, in one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import ostinato
from ostinato.bench.gpu.gpu_report import make_report, write_report
from ostinato.bench.gpu.parts import MINUTES, PARTS, Check, make_checks
from ostinato.bench.gpu.run_parts import CheckOutcome, Measure, measure_apart, run_checks
from ostinato.bench.report import BenchReport
from ostinato.cli.bench_common import names
from ostinato.errors import ConfigError
from ostinato.files import is_directory
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import DeviceSpec

EXIT_FAILED = 1
NEEDED = ("benchmarks/models", "tests/gpu", "tools")
SECONDS = 60


def gpu_check(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where report.json and report.txt go.")] = Path(
        "gpu-check"
    ),
    minutes: Annotated[float, typer.Option(min=1, help="Minutes of the whole check.")] = MINUTES,
    parts: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME...]", help="Some of the parts.", show_default=False)
    ] = None,
    checkout: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With tests and benchmarks/models. [default: here]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Test and measure Ostinato on this machine's GPU, in minutes.

    Eight parts in the order of their worth: kernels, the five changes that the project began with, verify, updates of
    states, decode steps, scans, gaps between steps and predictions; on random weights, without a network. Each is made
    of processes with a time limit. One that fails is reported, and the others still run. The report is written anew
    after each. Ends with status 1 unless every part ran, nothing was wrong and every mark was reached.

    Example: ostinato gpu-check --minutes 10 --output reports/h100

    Example: ostinato gpu-check --parts updates,decode
    """
    root = _checkout(checkout)
    device = _gpu()
    checks = chosen_checks(make_checks(root, device.capability), parts)
    report, is_ok = run_and_report(checks, device, minutes, output, partial(measure_apart, checkout=root))
    if as_json:
        print(report.to_json())
    if not is_ok:
        sys.exit(EXIT_FAILED)


def run_and_report(
    checks: Sequence[Check], device: DeviceSpec, minutes: float, output: Path, measure: Measure, note: str | None = None
) -> tuple[BenchReport, bool]:
    """Run the checks; write the report after each, and print it at the end. Return it, and whether all parts are ok.

    Each check's share of the time is its share of a check of `MINUTES`.
    """
    output.mkdir(parents=True, exist_ok=True)
    shares = [replace(check, seconds=check.seconds * minutes / MINUTES) for check in checks]
    console = Console(stderr=True)

    def keep(outcomes: Sequence[CheckOutcome]) -> None:
        write_report(make_report(outcomes, device, minutes * SECONDS, note), output)

    outcomes = run_checks(
        shares,
        minutes * SECONDS,
        measure,
        lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        keep,
    )
    report = make_report(outcomes, device, minutes * SECONDS, note)
    files = write_report(report, output)
    report.print(console)
    console.print("written:", ", ".join(map(str, files)), soft_wrap=True)
    return report, all(part["outcome"] == "ok" for part in report.data["parts"])


def _checkout(given: Path | None) -> Path:
    """Return the directory with the tests and the shapes. ConfigError if there is none."""
    places = [given] if given is not None else [Path.cwd(), Path(ostinato.__file__).parents[2]]
    for place in places:
        if all(is_directory(place / needed) for needed in NEEDED):
            return place.resolve()
    raise ConfigError(
        f"{places[0]} has no {' and '.join(NEEDED)}: gpu-check runs the tests of a checkout of Ostinato's repository, "
        "on its shapes; run it there, or name one by --checkout"
    )


def _gpu() -> DeviceSpec:
    try:
        return detect("cuda")
    except ConfigError as error:
        message = f"{error.message.partition(';')[0]}; `make gpu-rehearsal` runs every part without a GPU"
        raise ConfigError(message) from None


def chosen_checks(every: Sequence[Check], text: str | None) -> list[Check]:
    """Return the checks of the parts that `text` names, separated by commas; all without one."""
    wanted = tuple(PARTS) if text is None else names("--parts", text, tuple(PARTS))
    return [check for check in every if check.part in wanted]
