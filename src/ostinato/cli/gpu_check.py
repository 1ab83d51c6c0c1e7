"""`ostinato gpu-check`: everything that only a GPU can show, in one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import ostinato
from ostinato.bench.gpu.gpu_report import make_report, write_data, write_report
from ostinato.bench.gpu.parts import BUDGET, CheckPart, full_scale, make_parts, toy_scale
from ostinato.bench.gpu.run_parts import PartOutcome, measure_apart, run_parts
from ostinato.cli.bench_common import names
from ostinato.errors import ConfigError, Remedy
from ostinato.files import is_directory
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import DeviceSpec

EXIT_FAILED = 1
NEEDED = ("benchmarks/models", "tests/gpu", "tools")


def gpu_check(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where report.json and report.txt go.")] = Path(
        "gpu-check"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Every part on the CPU, on toy models: shows that a check would run.")
    ] = False,
    parts: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME...]", help="Some of the parts.", show_default=False)
    ] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds of the whole check.")] = BUDGET,
    checkout: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With tests and benchmarks/models. [default: here]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Test and measure Ostinato on this machine's GPU, in under nine minutes.

    Runs the tests that need a GPU, and then measures decode steps, kernels, graphs, prefill, the vision encoder, memory
    and capture, on random weights; without a network. Each part is a process with a time limit. A part that fails is
    reported, and the other parts still run. Ends with status 1 if a part failed.

    Example: ostinato gpu-check --output reports/h100

    Example: ostinato gpu-check --dry-run
    """
    root = _checkout(checkout)
    device = detect("cpu") if dry_run else _gpu()
    scale = toy_scale() if dry_run else full_scale(root, device.capability)
    chosen = _chosen(make_parts(scale), parts)
    output.mkdir(parents=True, exist_ok=True)

    def keep(outcomes: Sequence[PartOutcome]) -> None:
        write_data(make_report(outcomes, device, budget, is_dry=dry_run), output)

    console = Console(stderr=True)
    outcomes = run_parts(
        chosen,
        budget,
        partial(measure_apart, checkout=root),
        lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        keep,
    )
    report = make_report(outcomes, device, budget, is_dry=dry_run)
    files = write_report(report, output)
    if as_json:
        print(report.to_json())
    else:
        report.print(Console())
        print("written:", ", ".join(map(str, files)))
    if any(each.outcome in ("failed", "timed out") for each in outcomes):
        sys.exit(EXIT_FAILED)


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
        message = f"{error.message.partition(';')[0]}; --dry-run runs every part on the CPU"
        raise ConfigError(message, [Remedy("dry_run", True)]) from None


def _chosen(every: Sequence[CheckPart], text: str | None) -> list[CheckPart]:
    wanted = [part.name for part in every] if text is None else names("--parts", text, tuple(p.name for p in every))
    return [part for part in every if part.name in wanted]
