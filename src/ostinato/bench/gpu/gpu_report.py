"""Report of a GPU check: its summary and tables, and the files that hold it.

The summary puts measurements of several parts side by side, with the targets. Its functions are pure and take plain
data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from ostinato.bench.encoder import encoder_tables
from ostinato.bench.gpu.parts import PARTS
from ostinato.bench.gpu.run_parts import CheckOutcome
from ostinato.bench.graphs import graph_tables
from ostinato.bench.profile import profile_tables
from ostinato.bench.report import BenchReport, Column, Table, machine_facts, run_facts
from ostinato.bench.throughput import STEP_COLUMNS
from ostinato.files import write_text
from ostinato.json_io import JsonMapping, JsonObject, to_json_data
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.units import format_bytes

Found = Mapping[str, Mapping[str, Any]]
"""The data of the checks that have some, by name."""


@dataclass(frozen=True)
class GpuMark:
    """A number that a part must reach: the least or the greatest value of a measurement."""

    part: str
    name: str
    figure: Callable[[Found, float | None], float | None]
    """Function of the data, and the catalogue's bandwidth in bytes/s; it returns None if the value was not measured."""
    least: float | None = None
    most: float | None = None

    def row(self, found: Found, bandwidth: float | None) -> JsonObject:
        value = self.figure(found, bandwidth)
        is_met = None
        if value is not None:
            is_met = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        limits = {"least": self.least, "most": self.most}
        return {"part": self.part, "name": self.name, **limits, "reached": value, "is_met": is_met}


def part_rows(outcomes: Sequence[CheckOutcome], marks: Sequence[JsonMapping]) -> list[JsonObject]:
    """Return the outcome of each part: `ok` only if all its checks ran and are ok, and all its marks are met.

    Else it is the worst of its checks' outcomes, `incomplete` if only some of them ran, `missed` if a mark is missed,
    or `not measured` if no check gave a mark's figure. `reason` names the first such check or mark.
    """
    rows = []
    for part, title in PARTS.items():
        of_part = [each for each in outcomes if each.check.part == part]
        if not of_part:
            continue
        by_outcome = {each.outcome: each for each in reversed(of_part)}
        bad = next((by_outcome[name] for name in ("failed", "timed out", "skipped") if name in by_outcome), None)
        own = [mark for mark in marks if mark["part"] == part]
        mark = min(own, key=lambda mark: (False, None, True).index(mark["is_met"]), default=None)
        outcome, reason = "ok", None
        if bad is not None:
            is_partial = bad.outcome == "skipped" and len(by_outcome) > 1
            outcome, reason = "incomplete" if is_partial else bad.outcome, f"{bad.check.name}: {bad.reason}"
        elif mark is not None and not mark["is_met"]:
            outcome, reason = "not measured" if mark["is_met"] is None else "missed", mark["name"]
        seconds, limit = (sum(getattr(each, name) for each in of_part) for name in ("seconds", "limit"))
        rows.append(
            {"name": part, "title": title, "outcome": outcome, "seconds": seconds, "limit": limit, "reason": reason}
        )
    return rows


def decode_rows(found: Found, bandwidth: float | None) -> list[JsonObject]:
    """Return the times of a decode step of the 8B shape by number of rows.

    They are of the engine, with sampling and all; up to hidden states with a graph, without, and as predicted; and the
    sum of the operations.

    `reached` is the share of the catalogue's bandwidth (if that is not known, of the measured one) that the bytes of
    the step need in the engine's time for it.
    """
    rows = []
    steps = _by_rows(found.get("decode-8b", {}).get("results", ()), "batch_size")
    graphs = _by_rows(found.get("predicted-8b", {}).get("steps", ()), "rows")
    kernels = _by_rows(found.get("operations-8b", {}).get("decode", ()), "batch_size")
    for number in sorted({*steps, *graphs, *kernels}):
        step, graph, kernel = (each.get(number, {}) for each in (steps, graphs, kernels))
        seconds = (step.get("decode_step_seconds") or {}).get("p50")
        rows.append(
            {
                "model": "8b",
                "rows": number,
                "step_seconds": seconds,
                "tokens_per_second": None if seconds is None else number / seconds,
                "reached": _reached(step.get("floor"), seconds, bandwidth),
                "graph_seconds": _seconds(graph.get("cuda_ms") or graph.get("tape_ms")),
                "eager_seconds": _seconds(graph.get("eager_ms")),
                "kernel_seconds": (kernel.get("total") or {}).get("seconds"),
                "predicted_seconds": _seconds(graph.get("predicted_ms")),
            }
        )
    return rows


def recurrence_rows(found: Found, bandwidth: float | None) -> list[JsonObject]:
    """Return our kernels of recurrences and those of other projects, with the share of the bandwidth of each."""
    rows = []
    for name in ("updates", "prefill"):
        data = found.get(name, {})
        moved = bandwidth or _at(data, "machine", "copy_bytes_per_second")
        for each in data.get("results", ()):
            ours = {"seconds": each["seconds"], "reason": None}
            for whose, figures in {"ostinato": ours, **each["others"]}.items():
                seconds = figures.get("seconds")
                rows.append(
                    {
                        "operation": each["operation"],
                        "rows": each["rows"],
                        "tokens": each["tokens"],
                        "whose": whose,
                        "seconds": seconds,
                        "reached": None if not seconds or not moved else each["bytes"] / moved / seconds,
                        "difference": figures.get("difference"),
                        "reason": figures.get("reason"),
                    }
                )
    return rows


def gap_rows(found: Found) -> list[JsonObject]:
    """Return the time between steps by number of rows, one step ahead and not, and the server over `generate`."""
    rows: list[JsonObject] = []
    for each in found.get("overlap", {}).get("results", ()):
        off, on = _p50(each["off"]), _p50(each["on"])
        ratio = None if not on or not off else on / off
        rows.append({"name": f"step of {each['batch_size']} rows", "off": off, "on": on, "ratio": ratio})
    if "server" in found:
        name, ratio = "tokens/s of the server over `generate`", found["server"]["ratio"]["median"]
        rows.append({"name": name, "off": None, "on": None, "ratio": ratio})
    return rows


def _reached_at(rows: int) -> Callable[[Found, float | None], float | None]:
    def figure(found: Found, bandwidth: float | None) -> float | None:
        steps = decode_rows(found, bandwidth)
        return next((each["reached"] for each in steps if each["rows"] == rows), None)

    return figure


def _of_updates(operation: str) -> Callable[[Found, float | None], float | None]:
    def figure(found: Found, bandwidth: float | None) -> float | None:
        """Return the least share of the bandwidth from 64 rows on."""
        rows = recurrence_rows(found, bandwidth)
        own = [row for row in rows if (row["operation"], row["whose"]) == (operation, "ostinato")]
        return min((row["reached"] for row in own if row["rows"] >= 64 and row["reached"]), default=None)

    return figure


def _off_stride(found: Found, _: float | None) -> float | None:
    return _at(found, "ladder", "off_stride", "ratio", "median")


def _memory(found: Found, _: float | None) -> float | None:
    """Return the most memory that torch held, over what the plan says is used."""
    path = (("observed_bytes", "reserved_peak"), ("planned_bytes", "used"))
    observed, planned = (_at(found, "memory", *names) for names in path)
    return None if observed is None or not planned else observed / planned


def _graph_memory(found: Found, _: float | None) -> float | None:
    observed, planned = (_at(found, "memory", "capture", name) for name in ("observed_bytes", "planned_bytes"))
    return None if observed is None or not planned else observed / planned


def _misprediction(found: Found, _: float | None) -> float | None:
    """Return the largest difference between a predicted step and the measured one, as a part of the measured one."""
    ratios = [step["predicted_ratio"] for step in found.get("predicted-8b", {}).get("steps", ())]
    return None if not ratios or None in ratios else max(abs(ratio - 1) for ratio in ratios)


def _encoder_p99(found: Found, _: float | None) -> float | None:
    return _at(found, "encoder", "results", "alone", "speed", "p99")


MARKS = (
    GpuMark("seeds", "8B: memory held over memory planned", _memory, least=0.98, most=1.02),
    GpuMark("seeds", "8B: memory of graphs over the plan's bound", _graph_memory, most=1.02),
    GpuMark("seeds", "300M: prefill in steps off the stride over steps on it", _off_stride, least=0.95),
    GpuMark("seeds", "images: P99 without graphs over P99 with them", _encoder_p99, least=1),
    GpuMark("updates", "state_update from 64 rows on: part of bandwidth", _of_updates("state_update"), least=0.85),
    GpuMark("updates", "delta_update from 64 rows on: part of bandwidth", _of_updates("delta_update"), least=0.85),
    GpuMark("decode", "8B, 1 row: part of bandwidth", _reached_at(1), least=0.70),
    GpuMark("decode", "8B, 128 rows: part of bandwidth", _reached_at(128), least=0.65),
    GpuMark("predictions", "8B: largest misprediction of a step", _misprediction, most=0.15),
)
"""Marks of each part. Memory is that of a start of the 8B shape, and may not be far below the plan either."""


def _at(found: Found, *path: str) -> Any:
    value: Any = found
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
PART_COLUMNS = (
    Column("part", "name"),
    Column("", "outcome", is_text=True),
    Column("took", "seconds", "{:,.0f} s"),
    Column("at most", "limit", "{:,.0f} s"),
    Column("", "reason", is_text=True),
)
MARK_COLUMNS = (
    Column("mark", "name"),
    Column("least", "least", FIGURE),
    Column("most", "most", FIGURE),
    Column("reached", "reached", FIGURE),
    Column("", lambda row: {None: "not measured", True: "met", False: "MISSED"}[row["is_met"]], is_text=True),
)
DECODE = (
    Column("model", "model"),
    Column("rows", "rows"),
    Column("step", "step_seconds", "ms", help="of the engine, from token to token"),
    Column("tokens/s", "tokens_per_second", "count"),
    Column("of bandwidth", "reached", "percent", help="the bytes of the step over the catalogue's bandwidth"),
    Column("graph", "graph_seconds", "ms", help="up to hidden states"),
    Column("eager", "eager_seconds", "ms"),
    Column("predicted", "predicted_seconds", "ms", help="by the plan, up to hidden states"),
    Column("operations", "kernel_seconds", "ms", help="their sum, logits in it"),
)
RECURRENCES = (
    Column("operation", "operation"),
    Column("rows", "rows"),
    Column("tokens", "tokens", "count"),
    Column("whose", "whose", is_text=True),
    Column("seconds", "seconds", "ms"),
    Column("of bandwidth", "reached", "percent"),
    Column("differs", "difference", "{:.1e}", help="from ours, as a part of the largest"),
    Column("", "reason", is_text=True),
)
COMPILED = (
    Column("Triton", "triton"),
    Column("launches", "launches", "count"),
    Column("with findings", lambda data: len(data["findings"])),
)
GAPS = (
    Column("between steps", "name"),
    Column("overlap off", "off", "ms"),
    Column("on", "on", "ms"),
    Column("ratio", "ratio", "{:.3f}"),
)


def make_report(outcomes: Sequence[CheckOutcome], device: DeviceSpec, budget: float, note: str | None) -> BenchReport:
    """Make the report of all results, and of what is missing and why. `note` is a line for its end.

    A sum or a table that cannot be made is a note: the check's measurements are in the data all the same, and the part
    that needs it is not `ok`.
    """
    found = {each.check.name: each.data for each in outcomes if each.data is not None}
    bandwidth = device.bandwidth
    notes = [] if note is None else [note]

    def made(what: str, make: Callable[[], list[Any]]) -> list[Any]:
        try:
            return make()
        except Exception as error:
            notes.append(f"{what} could not be made ({type(error).__name__}: {error})")
            return []

    chosen = {each.check.part for each in outcomes}
    marks = [row for mark in MARKS if mark.part in chosen for row in made_mark(mark, found, bandwidth, notes)]
    data: JsonObject = {
        **run_facts("gpu-check"),
        "note": note,
        "device": to_json_data(device),
        "machine": {**machine_facts(), **_torch(found)},
        "budget_seconds": budget,
        "seconds": sum(each.seconds for each in outcomes),
        "parts": part_rows(outcomes, marks),
        "checks": [each.to_json() for each in outcomes],
        "marks": marks,
        "decode": made("the figures of decode steps", lambda: decode_rows(found, bandwidth)),
        "recurrences": made("the figures of recurrences", lambda: recurrence_rows(found, bandwidth)),
        "gaps": made("the gaps between steps", lambda: gap_rows(found)),
    }
    rows = [{**each.to_json(), "name": f"{each.check.part}: {each.check.name}"} for each in outcomes]
    tables = [Table(PART_COLUMNS, data["parts"], "parts"), Table(PART_COLUMNS, rows, "checks")]
    tables += [Table(columns, data[name], name) for name, columns in RESULTS.items() if data[name]]
    for each in outcomes:
        tables += made(f"{each.check.name}: its tables", partial(_shown_tables, each))
    facts = {
        "device": f"{device.name}, {format_bytes(device.memory_bytes)}; {device.source}",
        "machine": ", ".join(f"{name} {value}" for name, value in data["machine"].items()),
        "took": f"{data['seconds']:.0f} s of {budget:.0f} s",
    }
    return BenchReport(data, facts, tables, notes)


def made_mark(mark: GpuMark, found: Found, bandwidth: float | None, notes: list[str]) -> list[JsonObject]:
    """Return the row of a mark; one whose figure cannot be made was not measured."""
    try:
        return [mark.row(found, bandwidth)]
    except Exception as error:
        notes.append(f"{mark.name} could not be judged ({type(error).__name__}: {error})")
        return [mark.row({}, bandwidth)]


RESULTS = {"marks": MARK_COLUMNS, "decode": DECODE, "recurrences": RECURRENCES, "gaps": GAPS}
"""Tables that combine several checks."""


def _torch(found: Mapping[str, JsonMapping]) -> JsonObject:
    """Return the versions that a first start reported, else torch's from any other part: this process has no torch."""
    if "memory" in found:
        return dict(found["memory"]["versions"])
    machines = (data["machine"] for data in found.values() if "machine" in data)
    return next(({"torch": each["torch"]} for each in machines if "torch" in each), {})


def _shown_tables(outcome: CheckOutcome) -> list[Table]:
    """Return the tables of a check, with every cell tried: a report is not printed in part."""
    tables = _tables_of(outcome)
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                column.cell(row)
    return tables


def _tables_of(outcome: CheckOutcome) -> list[Table]:
    data, title = outcome.data, outcome.check.title
    if data is None:
        return []
    match outcome.check.kind:
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
        case "verify" if data["cells"]:
            cells = [{"cell": each, "verdict": each["verdict"]} for each in data["cells"]]
            return [Table((Column("way that differs", "cell"), Column("", "verdict", is_text=True)), cells, title)]
    return []


def _memory_table(data: JsonMapping, title: str) -> Table:
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


def write_data(report: BenchReport, directory: Path) -> Path:
    """Write the report as JSON; return the file."""
    path = directory / FILES[0]
    write_text(path, report.to_json() + "\n", "the report")
    return path


def write_report(report: BenchReport, directory: Path) -> tuple[Path, ...]:
    """Write the report as JSON and as tables; return the files."""
    data, text = write_data(report, directory), directory / FILES[1]
    tables = StringIO()
    report.print(Console(file=tables, width=WIDTH))
    write_text(text, tables.getvalue(), "the report")
    return data, text
