"""The tables of `ostinato bench profile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from ostinato.bench.profile_figures import MODEL
from ostinato.cli.bench_tables import columns

LENGTHS = "{context} tokens before each row, {prefill} prompt tokens"


def profile_tables(report: dict[str, Any]) -> list[Table]:
    chosen = report["kernels"]
    tables = []
    for step in report["decode"]:
        graph = f"{step['way']}, {step['graph_rows']} rows" if step["way"] == "tape" else "eager"
        tables.append(_kernels(f"decode, batch size {step['batch_size']} ({graph})", step, chosen))
    prefill = report["prefill"]
    tables.append(_kernels(f"prefill, {prefill['tokens']} tokens ({prefill['way']})", prefill, chosen))
    return [*tables, _phases(report)]


def _kernels(title: str, step: Mapping[str, Any], chosen: Mapping[str, str]) -> Table:
    """A step's kernels, longest first, with the sum of all, and what lies between them."""
    names = ["", "calls", "ms", "share", "MB", "GFLOP", "floor ms", "reached"]
    table = columns("kernel", *names)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for each in step["kernels"]:
        name = each["kernel"]
        kind = chosen.get("linear" if name == "logits" else name, "torch")
        table.add_row(name, kind, str(each["calls"]), _ms(each["seconds"]), f"{each['share']:.1%}", *_work(each))
    total = step["total"]
    table.add_row("all", "", "", _ms(total["seconds"]), "", "", "", *_floor(total))
    table.add_row("between them", "", "", _ms(step["between_kernels_seconds"]), *[""] * 5)
    return table


def _work(kernel: Mapping[str, Any]) -> Iterator[str]:
    for name, scale in (("bytes", 1e6), ("flops", 1e9)):
        yield "-" if kernel[name] is None else f"{kernel[name] / scale:,.2f}"
    yield from _floor(kernel)


def _floor(figures: Mapping[str, Any]) -> tuple[str, str]:
    if figures["floor_seconds"] is None:
        return ("-", "-")
    return (_ms(figures["floor_seconds"]), f"{figures['fraction_reached']:.0%}")


def _phases(report: Mapping[str, Any]) -> Table:
    """Milliseconds of a decode step in the engine's loop, by batch size."""
    steps = report["decode"]
    table = columns("a step of the engine, ms", *(f"batch {step['batch_size']}" for step in steps))
    for name in dict.fromkeys(name for step in steps for name in step["phases"]):
        table.add_row(name, *(_ms(step["phases"].get(name, 0.0)) for step in steps))
    around = [sum(seconds for name, seconds in step["phases"].items() if name not in MODEL) for step in steps]
    table.add_row("all but model and logits", *map(_ms, around))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
