"""Result of every benchmark: a `BenchReport` of tables that prints itself and is plain JSON.

`tools/plot_bench.py` draws charts of that JSON.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ostinato._version import __version__
from ostinato.json_io import JsonMapping, JsonObject, to_json_data
from ostinato.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from ostinato.config import EngineConfig
    from ostinato.plan.plan import Plan

ProgressCallback = Callable[[str], None]
"""Function that shows the user what is being measured now."""
Row = JsonMapping
Format = str | Callable[[Any], str]
"""Format of a value: a template for `str.format`, a name in `FORMATS`, or a function."""
FORMATS: dict[str, Format] = {
    "count": "{:,.0f}",
    "percent": "{:.0%}",
    "times": "{:.2f}x",
    "ms": lambda seconds: f"{seconds * 1e3:.1f} ms",
    "bytes": format_bytes,
}


def format_value(value: object, format: Format = "{}") -> str:
    """Return `value` as text. Text stays as it is, and None, which is what was not measured, is "-"."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    format = FORMATS.get(format, format) if isinstance(format, str) else format
    return format.format(value) if isinstance(format, str) else format(value)


@dataclass(frozen=True)
class Column:
    """A column: the `value` of each row, shown with `format`."""

    heading: str
    value: str | Callable[[Row], Any]
    """The path to the value in a row (`floor.step_seconds`), or a function of the row."""
    format: Format = "{}"
    help: str = ""
    """Explanation of the heading; printed below the table."""
    is_text: bool = False
    """True for text, which is aligned left. Texts that equal those of the row above are left out."""

    def cell(self, row: Row) -> str:
        return format_value(at(row, self.value) if isinstance(self.value, str) else self.value(row), self.format)


@dataclass(frozen=True)
class Table:
    """Rows under columns. The first column names the row."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""

    def print(self, console: Console) -> None:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            box=None, header_style="bold", title=self.title or None, title_justify="left", title_style="bold"
        )
        for number, column in enumerate(self.columns):
            is_left = number == 0 or column.is_text
            style = None if number else "cyan"
            table.add_column(column.heading, justify="left" if is_left else "right", style=style, no_wrap=number == 0)
        above: list[str] = []
        for row in self.rows:
            cells = [column.cell(row) for column in self.columns]
            known = 0
            while above and self.columns[known].is_text and cells[known] == above[known]:
                known += 1
            table.add_row(*[""] * known, *cells[known:])
            above = cells
        console.print(table)
        for column in self.columns:
            if column.help:
                console.print(Text(f" {column.heading}: {column.help}", style="dim italic"), soft_wrap=True)


@dataclass(frozen=True)
class BenchReport:
    """Measurements, and the facts about what was measured."""

    data: JsonObject
    """All measurements, as plain JSON data; units are in the names."""
    facts: Mapping[str, str]
    """Facts about what was run, and where: lines of a name and a text."""
    tables: Sequence[Table]
    notes: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps(self.data, indent=2)

    def print(self, console: Console) -> None:
        from rich.table import Table as RichTable
        from rich.text import Text

        facts = RichTable(box=None, show_header=False, title=self.data["command"], title_justify="left")
        facts.title_style = "bold"
        facts.add_column(style="cyan", no_wrap=True)
        facts.add_column(overflow="fold")
        ran = {name: self.data[key] for name, key in (("command", "command_line"), ("date", "date")) if self.data[key]}
        for name, text in {**self.facts, **ran}.items():
            facts.add_row(name, Text(text))
        console.print(facts)
        for table in self.tables:
            table.print(console)
        for note in self.notes:
            console.print(Text(note, style="dim italic"), soft_wrap=True)


def at(row: Row, path: str) -> Any:
    """Return the value at `path`, names with points between them; None if a value on the way is None."""
    value: Any = row
    for name in path.split("."):
        if value is None:
            return None
        value = value[name]
    return value


def spread_columns(path: str, format: Format, *others: str) -> tuple[Column, ...]:
    """Return columns for median, least and greatest of the spread at `path`, or for the fields `others`."""
    return tuple(Column(name, f"{path}.{name}", format) for name in others or ("median", "min", "max"))


def run_facts(command: str) -> JsonObject:
    """Return the first entries of every report's data. The command fills `command_line` in."""
    return {"command": command, "command_line": None, "date": datetime.now().astimezone().isoformat(timespec="seconds")}


def machine_facts(plan: Plan | None = None) -> JsonObject:
    """Return the processor, the cores that this process may use, and versions.

    With the plan of an engine in this process also its device, the threads that it uses and torch's version.
    """
    # Imported here: a table of figures needs no device.
    from ostinato.plan.device.detect import detect
    from ostinato.plan.device.linux import cpu_model

    machine = {"cpu": cpu_model(), "cores": detect("cpu").cores, "ostinato": __version__}
    machine["python"] = platform.python_version()
    if plan is None:
        return machine
    installed = version("torch") if find_spec("torch") is not None else "none"
    threads = plan.settings.threads or plan.device.cores
    return {**machine, "threads": threads, "torch": installed, "device": plan.device.name}


def model_facts(config: EngineConfig, plan: Plan) -> JsonObject:
    return {
        "name": config.model,
        "architecture": plan.model.architecture,
        "parameters": plan.model.parameters,
        "random_weights": config.random_weights,
    }


def engine_facts(command: str, config: EngineConfig, plan: Plan, **settings: object) -> JsonObject:
    """Return the first entries of the data of a report on an engine in this process.

    `settings` of the benchmark join those of the engine.
    """
    return {
        **run_facts(command),
        "model": model_facts(config, plan),
        "settings": {**to_json_data(plan.settings), **settings},
        "machine": machine_facts(plan),
    }


def engine_lines(data: JsonMapping, workload: str) -> dict[str, str]:
    """Return the facts to print of a report on an engine. `workload` is filled in from the settings."""
    model, machine, settings = data["model"], data["machine"], data["settings"]
    size = f"{model['architecture']}, {model['parameters'] / 1e6:,.0f} M"
    lines = {
        "model": f"{model['name']} ({size}{', random weights' if model['random_weights'] else ''})",
        "machine": f"{machine['cpu']}, {counted(machine['threads'], 'thread')}, torch {machine['torch']}",
        "run": f"{settings['device']}, {settings['dtype']}, {workload.format_map(settings)}, "
        f"{counted(settings['rounds'], 'round')}",
    }
    if "read_bytes_per_second" in machine:
        read, copy = machine["read_bytes_per_second"] / 1e9, machine["copy_bytes_per_second"] / 1e9
        lines["memory"] = f"read {read:.1f} GB/s, copy {copy:.1f} GB/s"
    if "flops_per_second" in machine:
        lines["products"] = f"{machine['flops_per_second'] / 1e9:,.0f} GFLOP/s in {settings['dtype']}"
    return lines


def capture_table(title: str, graphs: int, seconds: float, planned_bytes: int, observed_bytes: int) -> Table:
    """Return a table of time and memory of the capture of graphs."""
    each = f", {seconds / graphs * 1e3:.0f} ms each" if graphs else ""
    rows = [
        {"name": "time", "figure": f"{seconds:.2f} s, {graphs} graphs{each}"},
        {"name": "memory planned", "figure": format_bytes(planned_bytes)},
        {"name": "memory observed", "figure": format_bytes(observed_bytes)},
    ]
    return Table((Column(title, "name"), Column("", "figure")), rows)
