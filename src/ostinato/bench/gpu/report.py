"""The report of a check: its tables, its chart, and the files that it is kept in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from ostinato.bench.encoder_speed import encoder_tables
from ostinato.bench.gpu.check import PartOutcome
from ostinato.bench.gpu.summary import aims, decode_rows, lines, overlap_rows
from ostinato.bench.graph_speed import graph_tables
from ostinato.bench.profile import profile_tables
from ostinato.bench.reports import Chart, Column, Panel, BenchReport, Series, Table, machine_facts, run_facts
from ostinato.bench.throughput import STEP_COLUMNS
from ostinato.plain_data import to_json_data
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.units import format_bytes

FILES = ("report.json", "report.txt", "plot.png")
WIDTH = 140
"""Width of the tables in the file, in characters."""
FIGURE = "{:,.3g}"
PARTS = (
    Column("part", "name"),
    Column("", "outcome", is_text=True),
    Column("took", "seconds", "{:,.0f} s"),
    Column("at most", "limit", "{:,.0f} s"),
    Column("", "reason", is_text=True),
)
AIM_COLUMNS = (
    Column("aim", "name"),
    Column("least", "least", FIGURE),
    Column("most", "most", FIGURE),
    Column("reached", "reached", FIGURE),
    Column("", lambda row: {None: "not measured", True: "met", False: "missed"}[row["is_met"]], is_text=True),
)
DECODE = (
    Column("model", "model"),
    Column("rows", "rows"),
    Column("step", "step_seconds", "ms", help="of the engine, from token to token"),
    Column("tokens/s", "tokens_per_second", "count"),
    Column("of bandwidth", "reached", "percent", help="the bytes of the step over the catalogue's bandwidth"),
    Column("graph", "graph_seconds", "ms", help="up to hidden states"),
    Column("eager", "eager_seconds", "ms"),
    Column("kernels", "kernel_seconds", "ms", help="their sum, logits in it"),
    Column("predicted", "predicted_seconds", "ms", help="by the plan, of the kernels"),
    Column("transformers", "transformers_seconds", "ms"),
)
COMPILED = (
    Column("Triton", "triton"),
    Column("launches", "launches", "count"),
    Column("with findings", lambda data: len(data["findings"])),
)
OVERLAP = (
    Column("rows", "rows"),
    Column("overlap off", "off_seconds", "ms"),
    Column("on", "on_seconds", "ms"),
    Column("kernels", "kernel_seconds", "ms"),
)


def make_report(outcomes: Sequence[PartOutcome], device: DeviceSpec, budget: float, *, is_dry: bool) -> BenchReport:
    """Make the report of all results, and of what is missing and why.

    A sum or a table that cannot be made is a note: the part's measurements are in the data all the same.
    """
    found = {each.part.name: each.data for each in outcomes if each.data is not None}
    bandwidth = device.bandwidth
    notes = ["A dry run, of toy models on a CPU: the figures mean nothing."] if is_dry else []

    def made(what: str, make: Callable[[], list[Any]]) -> list[Any]:
        try:
            return make()
        except Exception as error:
            notes.append(f"{what} could not be made ({type(error).__name__}: {error})")
            return []

    data: dict[str, Any] = {
        **run_facts("gpu-check"),
        "is_dry_run": is_dry,
        "device": to_json_data(device),
        "machine": {**machine_facts(), **_torch(found)},
        "budget_seconds": budget,
        "seconds": sum(each.seconds for each in outcomes),
        "parts": [each.to_json() for each in outcomes],
        "aims": made("the aims", lambda: aims(found, bandwidth)),
        "decode": made("the figures of decode steps", lambda: decode_rows(found, bandwidth)),
        "overlap": made("the figures of overlap", lambda: overlap_rows(found)),
    }
    tables = [Table(PARTS, data["parts"], "parts")]
    tables += [Table(columns, data[name], name) for name, columns in RESULTS.items() if data[name]]
    for each in outcomes:
        tables += made(f"{each.part.name}: its tables", partial(_shown_tables, each))
    facts = {
        "device": f"{device.name}, {format_bytes(device.memory_bytes)}; {device.source}",
        "machine": ", ".join(f"{name} {value}" for name, value in data["machine"].items()),
        "took": f"{data['seconds']:.0f} s of {budget:.0f} s",
    }
    return BenchReport(data, facts, tables, notes, _chart(data))


RESULTS = {"aims": AIM_COLUMNS, "decode": DECODE, "overlap": OVERLAP}
"""Tables that combine several parts."""


def _torch(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the versions that a first start reported, else torch's from any other part: this process has no torch."""
    if "start" in found:
        return dict(found["start"]["versions"])
    machines = (data["machine"] for data in found.values() if "machine" in data)
    return next(({"torch": each["torch"]} for each in machines if "torch" in each), {})


def _shown_tables(outcome: PartOutcome) -> list[Table]:
    """Return the tables of a part, with every cell tried: a report is not printed in part."""
    tables = _tables_of(outcome)
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                column.cell(row)
    return tables


def _tables_of(outcome: PartOutcome) -> list[Table]:
    data, title = outcome.data, outcome.part.title
    if data is None:
        return []
    match outcome.part.kind:
        case "tests":
            failures = Table((Column("test that failed", "test"), Column("", "reason", is_text=True)), data["failures"])
            return [failures] if data["failures"] else []
        case "compile":
            findings = [{"finding": each} for each in data["findings"]]
            told = Table((Column("finding of the compiler", "finding", is_text=True),), findings)
            return [Table(COMPILED, [data], title), *([told] if findings else [])]
        case "start":
            return [_memory_table(data, title)]
        case "throughput":
            return [Table(STEP_COLUMNS, data["results"], title)]
        case "profile":
            return profile_tables(data)
        case "graphs":
            first, *others = graph_tables(data)
            return [Table(first.columns, first.rows, title), *others]
        case "encoder":
            return encoder_tables(data)
    return []


def _memory_table(data: Mapping[str, Any], title: str) -> Table:
    """Return a table of bytes planned and bytes observed, and seconds."""
    planned, observed, capture = data["planned_bytes"], data["observed_bytes"], data["capture"]
    rows: list[dict[str, Any]] = [
        {"name": "weights", "planned": planned["weights"], "observed": observed["weights"]},
        {"name": "graphs", "planned": capture["planned_bytes"], "observed": capture["observed_bytes"]},
        {"name": "activations", "planned": planned["activations"], "observed": None},
        {"name": "cache", "planned": planned["cache"], "observed": None},
        {"name": "all, held by torch at the most", "planned": planned["used"], "observed": observed["reserved_peak"]},
        {"name": "all, taken of the device", "planned": planned["available"], "observed": observed["device_used"]},
    ]
    columns = (Column(title, "name"), Column("planned", "planned", "bytes"), Column("observed", "observed", "bytes"))
    return Table(columns, rows)


def _chart(data: Mapping[str, Any]) -> Chart | None:
    """Return a chart of the share of the bandwidth, and the time of a step, against the number of rows."""
    rows = data["decode"]
    reached = [Series(points, model) for model, points in lines(rows, "reached")]
    times = [
        Series([(x, y * 1e3) for x, y in points], f"{model}, {label}", marker=marker)
        for figure, label, marker in (
            ("step_seconds", "step", "o"),
            ("eager_seconds", "eager", "s"),
            ("predicted_seconds", "predicted kernels", "^"),
        )
        for model, points in lines(rows, figure)
    ]
    if not reached and not times:
        return None
    panels = [Panel("rows of the decode step", "part of bandwidth", reached)]
    panels.append(Panel("rows of the decode step", "milliseconds", times))
    return Chart(f"{data['device']['name']}{', dry run' if data['is_dry_run'] else ''}", panels)


def write_data(report: BenchReport, directory: Path) -> Path:
    """Write the report as JSON; return the file."""
    path = directory / FILES[0]
    path.write_text(report.to_json() + "\n", encoding="utf-8")
    return path


def write_report(report: BenchReport, directory: Path) -> tuple[Path, ...]:
    """Write the report as JSON, as tables, and as a picture if matplotlib is installed; return the files."""
    data, text, plot = write_data(report, directory), directory / FILES[1], directory / FILES[2]
    with text.open("w", encoding="utf-8") as file:
        report.print(Console(file=file, width=WIDTH))
    if report.chart is None or find_spec("matplotlib") is None:
        return data, text
    report.chart.draw(plot)
    return data, text, plot
