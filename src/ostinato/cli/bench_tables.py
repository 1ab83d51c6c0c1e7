"""The tables that `ostinato bench` prints of its reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from ostinato.bench.compare import RATES
from ostinato.cli.output import figures_table
from ostinato.units import format_bytes

LENGTHS = "{prompt_len} prompt tokens, {output_len} new"


def show(
    report: dict[str, Any], as_json: bool, tables: Callable[[dict[str, Any]], list[Table]], lengths: str = LENGTHS
) -> None:
    """Prints a report, as JSON or as what it is about and its tables. `lengths` is filled in from its settings."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    model, machine, settings = report["model"], report["machine"], report["settings"]
    facts = figures_table(report["command"], justify="left")
    size = f"{model['architecture']}, {model['parameters'] / 1e6:,.0f} M"
    facts.add_row("model", f"{model['name']} ({size}{', random weights' if model['random_weights'] else ''})")
    facts.add_row("machine", f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}")
    run = f"{settings['device']}, {settings['dtype']}, {lengths.format_map(settings)}, {settings['rounds']} rounds"
    facts.add_row("run", run)
    if "read_bytes_per_second" in machine:
        read, copy = machine["read_bytes_per_second"] / 1e9, machine["copy_bytes_per_second"] / 1e9
        facts.add_row("memory", f"read {read:.1f} GB/s, copy {copy:.1f} GB/s")
    if "flops_per_second" in machine:
        facts.add_row("products", f"{machine['flops_per_second'] / 1e9:,.0f} GFLOP/s in {settings['dtype']}")
    for each in (facts, *tables(report)):
        console.print(each)


def throughput_tables(report: dict[str, Any]) -> list[Table]:
    rates = columns("batch", "tokens/s", "median", "min", "max")
    steps = columns("batch", "decode steps", "p50", "p99", "floor", "reached", "bookkeeping", "full/piecewise/eager")
    for result in report["results"]:
        for rate in RATES:
            rates.add_row(str(result["batch_size"]), _name(rate), *_spread(result[rate]))
        seconds, floor = result["decode_step_seconds"], result["floor"]
        steps.add_row(
            str(result["batch_size"]),
            str(result["decode_steps"]),
            *(milliseconds(seconds and seconds[name]) for name in ("p50", "p99")),
            milliseconds(floor and floor["step_seconds"]),
            "-" if floor is None else f"{floor['fraction_reached']:.0%}",
            f"{result['bookkeeping_share']:.2%}",
            "/".join(str(steps) for steps in result["step_modes"].values()),
        )
    return [rates, steps]


def compare_tables(report: dict[str, Any]) -> list[Table]:
    peer = report["compare"]["peer"]
    table = columns("batch", "tokens/s", "engine", "median", "min", "max", "ratio")
    for result in report["results"]:
        for rate in RATES:
            ratio = result["ratio"][rate]
            shown = "-" if ratio is None else f"{ratio:.2f}"
            table.add_row(str(result["batch_size"]), _name(rate), "ostinato", *_spread(result["ostinato"][rate]), shown)
            table.add_row("", "", peer, *_spread(result[peer][rate]), "")
    return [table]


def latency_tables(report: dict[str, Any]) -> list[Table]:
    table = columns("batch", "first token p50", "p99", "between tokens p50", "p99")
    for result in report["results"]:
        cells = []
        for figures in (result["time_to_first_token"], result["inter_token_latency"]):
            cells += [milliseconds(figures and figures[name]) for name in ("p50", "p99")]
        table.add_row(str(result["batch_size"]), *cells)
    return [table]


def startup_tables(report: dict[str, Any]) -> list[Table]:
    [result] = report["results"]
    table = columns("seconds", "median", "min", "max")
    for phase, spread in result["seconds"].items():
        table.add_row(phase, *(f"{spread[name]:.2f}" for name in ("median", "min", "max")))
    table.add_row("peak memory", format_bytes(result["peak_memory_bytes"]))
    return [table]


def columns(first: str, *others: str) -> Table:
    """An empty table: names in the first column, figures in the others."""
    table = Table(box=None, header_style="bold")
    table.add_column(first, style="cyan")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _name(rate: str) -> str:
    return rate.removesuffix("_tokens_per_second")


def _spread(spread: dict[str, float] | None) -> list[str]:
    return ["-"] * 3 if spread is None else [f"{spread[name]:,.0f}" for name in ("median", "min", "max")]


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
