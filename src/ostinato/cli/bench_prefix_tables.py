"""The tables of `ostinato bench prefix`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.table import Table

from ostinato.bench.prefix_run import COUNTERS
from ostinato.cli.bench_tables import columns, milliseconds
from ostinato.units import format_bytes

LENGTHS = "{shared_len} shared tokens, about {new_len} new, {output_len} of output, {concurrency} at once"


def prefix_tables(report: dict[str, Any]) -> list[Table]:
    results = report["results"]
    tables = [_configurations(report["configurations"]), _times(results, report["baseline"])]
    tables += [_misses(results), _counts(results)]
    if any(result["second_turn"] for result in results):
        tables.append(_second_turn(results, report["baseline"]))
    return tables


def _configurations(configurations: Iterable[dict[str, Any]]) -> Table:
    table = columns("configuration", "eviction", "spacing", "cache", "blocks", "slots", "checkpoints")
    for each in configurations:
        spacing = str(each["state_block_size"]) if each["mode"] in ("align", "all") else "-"
        counts = (f"{each[name]:,}" for name in ("blocks", "slots", "checkpoints"))
        name, eviction = each["configuration"], each["eviction_policy"] or "-"
        table.add_row(name, eviction, spacing, format_bytes(each["cache_bytes"]), *counts)
    return table


def _times(results: Sequence[dict[str, Any]], baseline: str | None) -> Table:
    """Hit rates, and seconds to the first token; the ratio is that of the means."""
    table = columns("workload", "hit rate", "first token", "p50", "p99", _to(baseline))
    for result in _under_workloads(table, results):
        times = result["time_to_first_token"]
        cells = [milliseconds(times[name]) for name in ("mean", "p50", "p99")]
        table.add_row(_name(result), f"{result['hit_rate']:.1%}", *cells, _median(result["first_token_ratio"]))
    return table


def _misses(results: Sequence[dict[str, Any]]) -> Table:
    """Tokens of prompts, by what became of them."""
    table = columns("workload", "prompts", "cached", "missed")
    table.columns[-1].justify = "left"
    for result in _under_workloads(table, results):
        misses = [f"{tokens:,} {cause.replace('_', ' ')}" for cause, tokens in result["misses"].items()]
        table.add_row(_name(result), f"{result['prompt_tokens']:,}", f"{result['cached_tokens']:,}", ", ".join(misses))
    return table


def _counts(results: Sequence[dict[str, Any]]) -> Table:
    table = columns("checkpoints", "taken", "not taken", "evicted", "blocks evicted", "preemptions")
    for result in _under_workloads(table, results):
        table.add_row(_name(result), *(f"{result[name]:,}" for name in COUNTERS))
    return table


def _second_turn(results: Sequence[dict[str, Any]], baseline: str | None) -> Table:
    """Medians over rounds, and the spread of how many times sooner the warm one is."""
    table = columns("second turn", "cold", "warm", "sooner", "min", "max", f"cold {_to(baseline)}")
    for result in results:
        turn = result["second_turn"]
        if turn is not None:
            times = [milliseconds(turn[name]["median"]) for name in ("cold_seconds", "warm_seconds")]
            speedup = [f"{turn['speedup'][name]:.1f}x" for name in ("median", "min", "max")]
            table.add_row(_name(result), *times, *speedup, _median(turn["cold_ratio"]))
    return table


def _under_workloads(table: Table, results: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Each result, after a row of `table` that names its workload if it is that workload's first."""
    table.columns[0].no_wrap = True
    for workload, group in groupby(results, itemgetter("workload")):
        table.add_row(f"[bold]{workload}[/bold]")
        yield from group


def _name(result: dict[str, Any]) -> str:
    return f"  {result['configuration']}"


def _to(baseline: str | None) -> str:
    """What a ratio compares with."""
    return "ratio" if baseline is None else f"to {baseline}"


def _median(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.2f}"
