"""The tables of `ostinato bench speculative`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ostinato.cli.bench_tables import columns
from ostinato.cli.output import controller_table

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
    return [speeds, steps] if report["controller"] is None else [speeds, steps, controller_table(report["controller"])]
