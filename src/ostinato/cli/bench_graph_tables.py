"""The tables of `ostinato bench graphs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from ostinato.cli.bench_tables import columns
from ostinato.cli.output import figures_table
from ostinato.units import format_bytes

LENGTHS = "{prompt_len} tokens before each row"


def graph_tables(report: dict[str, Any]) -> list[Table]:
    tables = [_times(report), _summary(report), _capture(report["capture"])]
    if report["off_stride"] is not None:
        tables.append(_off_stride(report["off_stride"]))
    return tables


def _times(report: Mapping[str, Any]) -> Table:
    """Milliseconds by batch size, each with the part of it that is spent in kernels."""
    backend, steps = report["backend"], report["steps"]
    has_floor = any(step["floor"] is not None for step in steps)
    names = ["graph", "padding", "eager", "kernels", backend, "kernels", "speed"]
    table = columns("rows", *names, *(["floor", "reached"] if has_floor else []))
    for step in steps:
        table.add_row(str(step["rows"]), *_step_cells(step, backend), *(_floor_cells(step) if has_floor else []))
    return table


def _step_cells(step: Mapping[str, Any], backend: str) -> Iterator[str]:
    if step["graph_rows"] is None:
        yield from ("eager", "-")
    else:
        yield from (f"{step['mode']} {step['graph_rows']}", str(step["padding"]))
    for way in ("eager", backend):
        yield _milliseconds(step[f"{way}_ms"])
        yield _milliseconds(step["kernel_ms"] and step["kernel_ms"].get(way))
    yield _times_as_fast(step["speed"])


def _floor_cells(step: Mapping[str, Any]) -> Sequence[str]:
    floor = step["floor"]
    if floor is None:
        return ("-", "-")
    return (_milliseconds(floor["step_seconds"] * 1e3), f"{floor['fraction_reached']:.0%}")


def _summary(report: Mapping[str, Any]) -> Table:
    """What the sizes come to: by their medians, and by their shortest times, which other work disturbs least."""
    table = columns("graphs against eager", "by medians", "by least times")
    both = (report, report["least"])
    if report["ratio"] is not None:
        table.add_row("speed, median", *(_times_as_fast(each["ratio"]["median"]) for each in both))
        worst = (f"{_times_as_fast(each['ratio']['worst'])} at {each['ratio']['worst_rows']} rows" for each in both)
        table.add_row("speed, worst", *worst)
    for way, cliff in report["cliff"].items():
        if cliff is not None:
            table.add_row(f"largest cliff, {way}", *(_cliff(each["cliff"][way]) for each in both))
    return table


def _cliff(cliff: Mapping[str, Any]) -> str:
    return f"{cliff['ratio']:.2f}x, {cliff['from']} to {cliff['to']} rows"


def _capture(capture: Mapping[str, Any]) -> Table:
    table = figures_table("capture")
    each = f"{capture['seconds_per_graph'] * 1e3:.0f} ms each"
    table.add_row("time", f"{capture['seconds']:.2f} s, {capture['graphs']} graphs, {each}")
    table.add_row("memory planned", format_bytes(capture["planned_bytes"]))
    table.add_row("memory observed", format_bytes(capture["observed_bytes"]))
    return table


def _off_stride(report: Mapping[str, Any]) -> Table:
    """Prompt tokens/s by max_num_batched_tokens, and how the steps ran."""
    results = report["results"]
    table = columns("step size", "tokens/s", "min", "max", "piecewise", "full", "eager", "padding")
    table.title, table.title_justify, table.title_style = "prefill by step size", "left", "bold"
    for result in results:
        rates = [f"{result['prefill_tokens_per_second'][name]:,.0f}" for name in ("median", "min", "max")]
        steps = [f"{result['steps'][mode]:,}" for mode in ("piecewise", "full", "eager")]
        table.add_row(str(result["max_num_batched_tokens"]), *rates, *steps, f"{result['padding']:,}")
    first, last = (results[index]["max_num_batched_tokens"] for index in (0, -1))
    table.add_row(f"{first} over {last}", *(f"{report['ratio'][name]:.3f}" for name in ("median", "min", "max")))
    return table


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _times_as_fast(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
