"""A picture of step time against batch size. matplotlib is an extra: only this file knows it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError


def check_plot(path: Path) -> None:
    """ConfigError if no picture could be written to `path`; to be called before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix.lstrip(".").lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(f"--plot {path} should end in .png, .svg or .pdf, which says the format")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path} should lie in a directory that exists")


def plot_steps(report: Mapping[str, Any], path: Path) -> None:
    """Draws the steps of a report of `ostinato bench graphs`; the sizes of graphs are marked."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, backend = report["steps"], report["backend"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    captured = sorted({step["graph_rows"] for step in steps if step["graph_rows"] is not None})
    for number, size in enumerate(captured):
        axes.axvline(size, color="0.85", linewidth=1, zorder=0, label=None if number else "size of a graph")
    for kind, label, marker in (("eager_ms", "eager", "o"), (f"{backend}_ms", f"graph ({backend})", "s")):
        drawn = [(step["rows"], step[kind]) for step in steps if step[kind] is not None]
        axes.plot(*zip(*drawn, strict=True), marker=marker, markersize=3.5, linewidth=1.2, label=label)
    axes.set(xlabel="rows of the decode step", ylabel="milliseconds", title=_title(report))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _title(report: Mapping[str, Any]) -> str:
    model, machine, settings = report["model"], report["machine"], report["settings"]
    where = machine["cpu"] if settings["device"] == "cpu" else machine["device"]
    name = Path(model["name"]).name
    return f"{name}, {settings['dtype']}, {where}, {machine['threads']} threads"
