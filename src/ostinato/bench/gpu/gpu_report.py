"""Report of a GPU check: its summary and tables, and the files that hold it.

The summary puts measurements of several parts side by side, with the targets. Its functions are pure and take plain
data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ostinato.bench.encoder import encoder_tables
from ostinato.bench.gpu.run_parts import PartOutcome
from ostinato.bench.graphs import graph_tables
from ostinato.bench.profile import profile_tables
from ostinato.bench.report import BenchReport, Column, Table, machine_facts, run_facts
from ostinato.bench.throughput import STEP_COLUMNS
from ostinato.json_io import JsonMapping, JsonObject, to_json_data
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.units import format_bytes

PartResults = Mapping[str, JsonMapping]
"""The data of the parts that have some, by name."""
MODELS = ("8b", "300m")


@dataclass(frozen=True)
class Aim:
    """A target: the least or the greatest value that a measurement should have."""

    name: str
    figure: Callable[[PartResults, float | None], float | None]
    """Function of the data, and the catalogue's bandwidth in bytes/s; it returns None if the value was not measured."""
    least: float | None = None
    most: float | None = None

    def row(self, results: PartResults, bandwidth: float | None) -> JsonObject:
        value = self.figure(results, bandwidth)
        is_met = None
        if value is not None:
            is_met = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return {"name": self.name, "least": self.least, "most": self.most, "reached": value, "is_met": is_met}


def decode_rows(results: PartResults, bandwidth: float | None) -> list[JsonObject]:
    """Return the times of a decode step by model and number of rows.

    They are of the engine, with sampling and all; up to hidden states with a graph and without; the sum of the kernels;
    the plan's prediction of them; and of transformers.

    `reached` is the share of the catalogue's bandwidth (if that is not known, of the measured one) that the bytes of
    the step need in the engine's time for it.
    """
    rows = []
    for model in MODELS:
        steps = _by_rows(results.get(f"decode-{model}", {}).get("results", ()), "batch_size")
        graphs = _by_rows(results.get(f"graphs-{model}", {}).get("steps", ()), "rows")
        kernels = _by_rows(results.get(f"kernels-{model}", {}).get("decode", ()), "batch_size")
        peers = _by_rows(results.get("transformers", {}).get("results", ()) if model == "300m" else (), "batch_size")
        for number in sorted({*steps, *graphs, *kernels}):
            step, graph, kernel, peer = (each.get(number, {}) for each in (steps, graphs, kernels, peers))
            seconds = (step.get("decode_step_seconds") or {}).get("p50")
            of_kernels = (kernel.get("total") or {}).get("seconds")
            predicted = kernel.get("predicted")
            rows.append(
                {
                    "model": model,
                    "rows": number,
                    "step_seconds": seconds,
                    "tokens_per_second": None if seconds is None else number / seconds,
                    "reached": _reached(step.get("floor"), seconds, bandwidth),
                    "graph_seconds": _seconds(graph.get("cuda_ms") or graph.get("tape_ms")),
                    "eager_seconds": _seconds(graph.get("eager_ms")),
                    "kernel_seconds": of_kernels,
                    "predicted_seconds": None if predicted is None else sum(predicted.values()),
                    "transformers_seconds": _p50(peer.get("transformers")),
                }
            )
    return rows


def overlap_rows(results: PartResults) -> list[JsonObject]:
    """Return the time between steps by number of rows, with and without overlap, and that of the step's kernels."""
    kernels = _by_rows(results.get("kernels-300m", {}).get("decode", ()), "batch_size")
    return [
        {
            "rows": point["batch_size"],
            "off_seconds": _p50(point["off"]),
            "on_seconds": _p50(point["on"]),
            "kernel_seconds": (kernels.get(point["batch_size"], {}).get("total") or {}).get("seconds"),
        }
        for point in results.get("overlap", {}).get("results", ())
    ]


def aims(results: PartResults, bandwidth: float | None) -> list[JsonObject]:
    """Return the targets and the measured values. `is_met` None: it was not measured."""
    return [aim.row(results, bandwidth) for aim in AIMS]


def _reached_at(rows: int) -> Callable[[PartResults, float | None], float | None]:
    def figure(results: PartResults, bandwidth: float | None) -> float | None:
        steps = decode_rows(results, bandwidth)
        return next((step["reached"] for step in steps if (step["model"], step["rows"]) == ("8b", rows)), None)

    return figure


def _of_state_update(results: PartResults, bandwidth: float | None) -> float | None:
    """Return the least share of the bandwidth that `state_update` reaches from 64 rows on."""
    reached = [
        kernel["bytes"] / bandwidth / kernel["seconds"]
        for step in results.get("kernels-8b", {}).get("decode", ())
        for kernel in step["kernels"]
        if kernel["kernel"] == "state_update" and step["batch_size"] >= 64 and bandwidth and kernel["bytes"]
    ]
    return min(reached, default=None)


def _capture_seconds(results: PartResults, _: float | None) -> float | None:
    return _at(results, "graphs-8b", "capture", "seconds")


def _off_stride(results: PartResults, _: float | None) -> float | None:
    return _at(results, "graphs-300m", "off_stride", "ratio", "median")


def _over_kernels(results: PartResults, _: float | None) -> float | None:
    """Return the greatest ratio of a step with overlap to the sum of its kernels."""
    pairs = [(point["on_seconds"], point["kernel_seconds"]) for point in overlap_rows(results)]
    return max((step / kernels for step, kernels in pairs if step and kernels), default=None)


def _failed_tests(results: PartResults, _: float | None) -> float | None:
    return _at(results, "tests", "failed")


def _memory(results: PartResults, _: float | None) -> float | None:
    """Return the most memory that torch held, over what the plan says is used."""
    observed, planned = (
        _at(results, "start", "observed_bytes", "reserved_peak"),
        _at(results, "start", "planned_bytes", "used"),
    )
    return None if observed is None or not planned else observed / planned


AIMS = (
    Aim("tests that failed", _failed_tests, most=0),
    Aim("8B, 1 row: part of bandwidth", _reached_at(1), least=0.65),
    Aim("8B, 256 rows: part of bandwidth", _reached_at(256), least=0.60),
    Aim("8B, state_update from 64 rows on: part of bandwidth", _of_state_update, least=0.80),
    Aim("8B, capture of the default ladders, seconds", _capture_seconds, most=10),
    Aim("prefill, steps off the stride over steps on it", _off_stride, least=0.95),
    Aim("300M, step with overlap over its kernels", _over_kernels, most=1.05),
    Aim("8B, memory held over memory planned", _memory, most=1),
)


def _at(results: PartResults, *path: str) -> Any:
    value: Any = results
    for name in path:
        value = None if value is None else value.get(name)
    return value


def _by_rows(steps: Sequence[JsonMapping], name: str) -> dict[int, JsonMapping]:
    return {step[name]: step for step in steps}


def _p50(figures: JsonMapping | None) -> float | None:
    return None if figures is None else (figures.get("decode_step_seconds") or {}).get("p50")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _reached(floor: JsonMapping | None, seconds: float | None, bandwidth: float | None) -> float | None:
    if floor is None or not seconds:
        return None
    if bandwidth is None:
        reached: float = floor["fraction_reached"]
        return reached
    return float(floor["step_bytes"]["total"] / bandwidth / seconds)


FILES = ("report.json", "report.txt")
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
    results = {outcome.part.name: outcome.data for outcome in outcomes if outcome.data is not None}
    bandwidth = device.bandwidth
    notes = ["A dry run, of toy models on a CPU: the figures mean nothing."] if is_dry else []

    def made(what: str, make: Callable[[], list[Any]]) -> list[Any]:
        try:
            return make()
        except Exception as error:
            notes.append(f"{what} could not be made ({type(error).__name__}: {error})")
            return []

    data: JsonObject = {
        **run_facts("gpu-check"),
        "is_dry_run": is_dry,
        "device": to_json_data(device),
        "machine": {**machine_facts(), **_torch(results)},
        "budget_seconds": budget,
        "seconds": sum(outcome.seconds for outcome in outcomes),
        "parts": [outcome.to_json() for outcome in outcomes],
        "aims": made("the aims", lambda: aims(results, bandwidth)),
        "decode": made("the figures of decode steps", lambda: decode_rows(results, bandwidth)),
        "overlap": made("the figures of overlap", lambda: overlap_rows(results)),
    }
    tables = [Table(PARTS, data["parts"], "parts")]
    tables += [Table(columns, data[name], name) for name, columns in RESULTS.items() if data[name]]
    for outcome in outcomes:
        tables += made(f"{outcome.part.name}: its tables", partial(_shown_tables, outcome))
    facts = {
        "device": f"{device.name}, {format_bytes(device.memory_bytes)}; {device.source}",
        "machine": ", ".join(f"{name} {value}" for name, value in data["machine"].items()),
        "took": f"{data['seconds']:.0f} s of {budget:.0f} s",
    }
    return BenchReport(data, facts, tables, notes)


RESULTS = {"aims": AIM_COLUMNS, "decode": DECODE, "overlap": OVERLAP}
"""Tables that combine several parts."""


def _torch(results: Mapping[str, JsonMapping]) -> JsonObject:
    """Return the versions that a first start reported, else torch's from any other part: this process has no torch."""
    if "start" in results:
        return dict(results["start"]["versions"])
    machines = (data["machine"] for data in results.values() if "machine" in data)
    return next(({"torch": machine["torch"]} for machine in machines if "torch" in machine), {})


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
            findings = [{"finding": finding} for finding in data["findings"]]
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


def _memory_table(data: JsonMapping, title: str) -> Table:
    """Return a table of bytes planned and bytes observed, and seconds."""
    planned, observed, capture = data["planned_bytes"], data["observed_bytes"], data["capture"]
    rows: list[JsonObject] = [
        {"name": "weights", "planned": planned["weights"], "observed": observed["weights"]},
        {"name": "graphs", "planned": capture["planned_bytes"], "observed": capture["observed_bytes"]},
        {"name": "activations", "planned": planned["activations"], "observed": None},
        {"name": "cache", "planned": planned["cache"], "observed": None},
        {"name": "all, held by torch at the most", "planned": planned["used"], "observed": observed["reserved_peak"]},
        {"name": "all, taken of the device", "planned": planned["available"], "observed": observed["device_used"]},
    ]
    columns = (Column(title, "name"), Column("planned", "planned", "bytes"), Column("observed", "observed", "bytes"))
    return Table(columns, rows)


def write_data(report: BenchReport, directory: Path) -> Path:
    """Write the report as JSON; return the file."""
    path = directory / FILES[0]
    path.write_text(report.to_json() + "\n", encoding="utf-8")
    return path


def write_report(report: BenchReport, directory: Path) -> tuple[Path, ...]:
    """Write the report as JSON and as tables; return the files."""
    data, text = write_data(report, directory), directory / FILES[1]
    with text.open("w", encoding="utf-8") as file:
        report.print(Console(file=file, width=WIDTH))
    return data, text
