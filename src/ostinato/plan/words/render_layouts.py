"""Estimates of layouts, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from ostinato.plan.layouts.layout import CapacityEstimate, LoadPoint


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
    return " / ".join(f"{each:,.0f}" if each >= 10 else f"{each:.1f}" for each in milliseconds)


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
