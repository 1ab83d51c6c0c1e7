"""Text of a plan's graphs, of sizes chosen from traffic, and of estimates of layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.plan.effective_settings import EffectiveSettings
from ostinato.plan.graphs.capture_plan import CapturePlan
from ostinato.plan.graphs.coverage import DecodeRange, MixedRange, Uncovered
from ostinato.units import counted, format_bytes

if TYPE_CHECKING:
    from ostinato.plan.capacity.estimate import CapacityEstimate, LoadPoint
    from ostinato.plan.traffic import Sizing

MIN_RUN = 4
"""Minimum number of equally spaced sizes that are written as a range."""


def graph_rows(capture: CapturePlan, settings: EffectiveSettings) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each row; a text may have several lines."""
    yield "graph_mode", capture.graph_mode
    if capture.graph_mode != "none":
        when = "at start-up" if settings.capture == "startup" else "when first needed"
        yield "captured", f"{when}, by backend {capture.backend}"
    if capture.time is not None:
        time = capture.time
        yield (
            "capture takes",
            f"about {time.seconds:.1f} s: {time.graphs} graphs, {time.launches:,} launches ({time.source})",
        )
    if capture.tokens:
        yield "piecewise, tokens", short_sizes(capture.tokens)
    if capture.splits:
        yield "piecewise, without", ", ".join(capture.splits)
    if capture.rows:
        *fewer, most = map(str, capture.tokens_per_row)
        per_row = f"{', '.join(fewer)} or {most}"
        one = not fewer
        yield "full, rows", short_sizes(capture.rows) + ("" if one else f"; of {per_row} tokens each")
    uncovered: dict[DecodeRange | MixedRange, Uncovered] = {entry.batches: entry for entry in capture.uncovered}
    for tokens_per_row in capture.tokens_per_row:
        decode = [entry for entry in capture.coverage.decode if entry.tokens_per_row == tokens_per_row]
        name = "decode" if tokens_per_row == 1 else f"decode, {tokens_per_row} tokens"
        yield name, "\n".join(_lines(decode, "row", uncovered))
    yield "mixed", "\n".join(_lines(capture.coverage.mixed, "token", uncovered))


def short_sizes(sizes: Sequence[int]) -> str:
    """Return ascending sizes as text such as `1, 2, 4, 8..256 by 8`, runs of equal steps as ranges."""
    words: list[str] = []
    first = 0
    while first < len(sizes):
        last = first + 1
        while last + 1 < len(sizes) and sizes[last + 1] - sizes[last] == sizes[first + 1] - sizes[first]:
            last += 1
        if last - first + 1 >= MIN_RUN and last < len(sizes):
            step = sizes[first + 1] - sizes[first]
            words.append(f"{sizes[first]}..{sizes[last]}" + (f" by {step}" if step > 1 else ""))
            first = last + 1
        else:
            words.append(str(sizes[first]))
            first += 1
    return ", ".join(words)


def print_sizing(sizing: Sizing, console: Console) -> None:
    """Print the outcomes of the planned and the chosen ladders for the traffic, and the flags to choose them.

    Flags are never wrapped, so that they can be copied.
    """
    table = Table(title="sizes from traffic", title_justify="left", title_style="bold", box=None)
    for heading in ("ladder", "sizes", "replayed", "eager", "padding tokens", "per step"):
        table.add_column(heading, justify="left" if heading == "ladder" else "right", header_style="")
    for name, choice in sizing.choices():
        for which, entry in (("planned", choice.planned), ("chosen", choice.chosen)):
            figures = (len(entry.sizes), entry.replayed, entry.eager, entry.padding)
            table.add_row(f"{name}, {which}", *(f"{figure:,}" for figure in figures), f"{entry.mean_padding:.2f}")
    console.print("", table)
    for flag in sizing.flags:
        console.print(Text(f" {flag}"), soft_wrap=True)


def _lines(
    ranges: Sequence[DecodeRange | MixedRange], unit: str, uncovered: dict[DecodeRange | MixedRange, Uncovered]
) -> Iterator[str]:
    """Yield one line for each run of ranges that are served alike."""
    for mode, run in groupby(ranges, key=lambda entry: entry.mode):
        entries = list(run)
        batches = f"{entries[0].from_}..{entries[-1].to} {unit}s"
        if entries[0].from_ == entries[-1].to:
            batches = counted(entries[0].to, unit)
        if mode == "eager":
            yield f"{batches}: eager; {_what_covers(uncovered[entries[0]])}"
        else:
            yield f"{batches}: {mode}, {_padding(entries)}"


def _padding(entries: Sequence[DecodeRange | MixedRange]) -> str:
    most = max(entry.most_padding for entry in entries)
    first = entries[0]
    if isinstance(first, DecodeRange) and first.mode == "full":
        most, unit = most // first.tokens_per_row, "padding row"
    else:
        unit = "padding token"
    return f"at most {counted(most, unit)}" if most else "without padding"


def _what_covers(entry: Uncovered) -> str:
    changes = " and ".join(f"{change.setting} {_value(change.value)}" for change in entry.changes)
    memory = f"with {format_bytes(entry.memory)} more" if entry.memory else "with no more memory"
    return f"{changes} would cover them, {memory}"


def _value(value: object) -> str:
    return short_sizes(value) if isinstance(value, list) else str(value)


def print_layouts(estimate: CapacityEstimate, console: Console) -> None:
    """Print the estimates, a row for each rate, and an explanation of the numbers."""
    table = Table(title="requests that engines carry", title_justify="left", title_style="bold", box=None)
    headings = ["replicas", "devices", "requests/s", "load", "rows", "first token, ms", "per token, ms"]
    for heading in [*headings, *(["in time"] if estimate.deadline is not None else [])]:
        table.add_column(heading, justify="right", header_style="")
    for load in estimate.loads:
        table.add_row(*_cells(load))
    console.print("", table)
    for line in _capacity_lines(estimate):
        console.print(f" {line}", highlight=False)


def _cells(load: LoadPoint) -> Iterator[str]:
    yield f"{load.replicas:,}"
    yield f"{load.devices:,}"
    yield f"{load.per_second:,.3g}" if load.per_second < 1000 else f"{load.per_second:,.0f}"
    yield f"{load.share:.0%}"
    if load.first_token is None:
        yield from ("", "queue grows", "")
        return
    yield f"{load.rows:,.1f}"
    yield _milliseconds(load.first_token)
    yield _milliseconds(load.per_token or ())
    if load.in_time is not None:
        yield f"{load.in_time:.1%}"


def _milliseconds(values: tuple[float, ...]) -> str:
    """Return the quantiles as text: `12 / 40 / 81`."""
    milliseconds = [1e3 * value for value in values]
    return " / ".join(
        f"{millisecond:,.0f}" if millisecond >= 10 else f"{millisecond:.1f}" for millisecond in milliseconds
    )


def _capacity_lines(estimate: CapacityEstimate) -> Iterator[str]:
    most, least = ("at most ", "at least ") if estimate.is_lower_bound else ("", "")
    yield (
        f"{estimate.mean_prompt:,.0f} tokens of prompt and {estimate.mean_output:,.0f} of output in the mean, "
        f"{estimate.cached_share:.0%} of prompts from the prefix cache"
    )
    yield (
        f"one replica carries {most}{estimate.most_per_second:,.3g} requests/s: {estimate.rows:,.3g} rows in a step of "
        f"{least}{1e3 * estimate.step_seconds:,.3g} ms"
    )
    yield (
        "an estimate: a simulated queue of random arrivals, steps as long as predicted; times are of the middle, of "
        f"95 % and of 99 % of the requests{', and each is at least that' if estimate.is_lower_bound else ''}"
    )
