"""The tables of `ostinato bench speculative`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ostinato.cli.bench_tables import columns

LENGTHS = "{prompts}, up to {output_len} new tokens"


def speculative_tables(report: dict[str, Any]) -> list[Table]:
    speeds = columns("batch", "drafts", "tokens/s", "speed", "in all")
    steps = columns("batch", "drafts", "step ms", "cost", "tokens/step", "acceptance")
    for result in report["results"]:
        name = str(result["batch_size"]), result["variant"]
        speeds.add_row(
            *name,
            f"{result['decode_tokens_per_second']['median']:,.0f}",
            f"{result['speed']['median']:.2f}",
            f"{result['total_speed']['median']:.2f}",
        )
        steps.add_row(
            *name,
            f"{result['step_milliseconds']:.2f}",
            f"{result['step_cost']:.2f}",
            f"{result['tokens_per_step']:.2f}",
            " ".join("-" if share is None else f"{share:.2f}" for share in result["acceptance"]) or "-",
        )
    return [speeds, steps] if report["controller"] is None else [speeds, steps, _controller(report["controller"])]


def _controller(controller: Mapping[str, Any]) -> Table:
    """What the controller chose at last, and why."""
    table = columns("rows", "choice", "ground")
    for each in controller["batch_sizes"]:
        fewest, most = each["rows"]
        rows = str(most) if fewest == most else f"{fewest} to {most}"
        table.add_row(rows, f"{each['choice']} drafts", each["ground"])
    return table
