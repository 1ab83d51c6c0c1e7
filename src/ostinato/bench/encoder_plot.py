"""A picture of the encoder's latency against the tokens of an arrival. matplotlib is an extra, imported when asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_encoder(report: Mapping[str, Any], path: Path) -> None:
    """Draws the arrivals of a report of `ostinato bench encoder`; budgets are marked. `path` passed `check_plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, budget in enumerate(report["plan"]["token_budgets"]):
        axes.axvline(budget, color="0.85", linewidth=1, zorder=0, label=None if number else "budget of a graph")
    points = [point for result in report["results"].values() for point in result["points"]]
    for way, marker, label in (("eager_ms", "o", "eager"), ("graph_ms", "s", f"graphs ({report['backend']})")):
        xs, ys = [point["tokens"] for point in points], [point[way] for point in points]
        axes.scatter(xs, ys, s=12, marker=marker, alpha=0.7, label=label)
    model, settings = report["model"], report["settings"]
    axes.set(xlabel="output tokens of an arrival", ylabel="milliseconds (shortest of all rounds)")
    axes.set_title(f"encoder of {Path(model['name']).name}, {settings['dtype']}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
