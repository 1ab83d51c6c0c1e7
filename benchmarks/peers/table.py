"""The report as Markdown: for each model a table of engines, and one of ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.report import RIVALS

QUIET = 0.05
"""Of all processors' time, what other work may take."""


def markdown(report: Mapping[str, Any]) -> str:
    setup, processor = report["setup"], report["processor"]
    workload = setup["workload"]
    facts = [
        f"{processor['kind']}: {processor['name']}, {setup['threads']} threads, median of {setup['rounds']} round(s), "
        f"measured {period(report['measured'])}.",
        f"Tokens/s: prefill of {workload['prefill_len']} tokens; decode of {workload['output_len']} after "
        f"{workload['prompt_len']}, by batch size.",
    ]
    rates = [
        f"{figures['bytes_per_second'] / 1e9:.1f} ({model})"
        for model, figures in report["models"].items()
        if figures["bytes_per_second"] is not None
    ]
    if rates:
        facts.append(
            "Floor: the bytes that a decode step must move, at the bandwidth of simple loops, measured in each round "
            f"before the engines; medians in GB/s: {', '.join(rates)}."
        )
    if report["busy"] is not None and report["busy"] > QUIET:
        facts.append(f"The machine was not quiet: {report['busy']:.0%} of its time went to other work.")
    parts = ["\n".join(facts)]
    for model, figures in report["models"].items():
        parts.append(f"## {model}\n\n{_engines(figures, workload['batch_sizes'])}")
        if figures["ratios"]:
            parts.append(_ratios(figures["ratios"], workload["batch_sizes"]))
        errors = [(name, error) for name, engine in figures["engines"].items() for error in engine["errors"]]
        if errors:
            parts.append("\n".join(f"- {name} failed: {error}" for name, error in errors))
    if report["skipped"]:
        parts.append("\n".join(f"- {name} was not measured: {why}" for name, why in report["skipped"].items()))
    return "\n\n".join(parts) + "\n"


def period(dates: Sequence[str]) -> str:
    """The days of a record, of the first and the last of them."""
    return " to ".join(dict.fromkeys(dates))


def _engines(figures: Mapping[str, Any], sizes: Sequence[int]) -> str:
    least = str(min(sizes))
    header = ["engine", "prefill", *(f"decode {size}" for size in sizes)]
    rows = []
    for name, engine in figures["engines"].items():
        if "decode" not in engine:
            continue
        start = engine["startup_seconds"] or engine["first_start_seconds"]
        rows.append(
            [
                f"{name} {engine['version']}",
                f"{engine['prefill']['median']:.0f}",
                *(f"{engine['decode'][str(size)]['median']:.1f}" for size in sizes),
                _percent(engine["floor_share"][least]),
                f"{start['median']:.1f}{'' if engine['startup_seconds'] else ' (first)'}",
                f"{engine['peak_memory_bytes']['median'] / 1e6:.0f}",
            ]
        )
    return _table([*header, f"floor at {least}", "start s", "memory MB"], rows)


def _ratios(ratios: Mapping[str, Any], sizes: Sequence[int]) -> str:
    header = ["ratio", "prefill", *(f"decode {size}" for size in sizes), "start", "memory"]
    rows = []
    for name, each in ratios.items():
        rates = [each["prefill"], *(each["decode"][str(size)] for size in sizes)]
        costs = [each["startup_seconds"], each["peak_memory_bytes"]]
        rows.append([f"{name} / {_best_of(RIVALS[name])}", *(_times(value) for value in (*rates, *costs))])
    return f"{_table(header, rows)}\n\nAbove 1, Ostinato is better; start and memory are beside vllm's."


def _best_of(rivals: Sequence[str]) -> str:
    return rivals[0] if len(rivals) == 1 else f"the better of {' and '.join(rivals)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, marks, *rows))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
