"""Charts of reports. matplotlib is an extra: only this file knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ostinato.errors import ConfigError


@dataclass(frozen=True)
class Series:
    """Points that belong together: as a line, as points alone, or as steps of a distribution."""

    points: Sequence[tuple[float, float]]
    label: str | None = None
    kind: Literal["line", "points", "steps"] = "line"
    marker: str = "o"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `marks` are vertical lines. With `ticks`, x counts them from 0."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[float] = ()
    marks_label: str = ""
    ticks: Sequence[str] | None = None

    def draw(self, axes: Any) -> None:
        for number, x in enumerate(self.marks):
            axes.axvline(x, color="0.85", linewidth=1, zorder=0, label=None if number else self.marks_label)
        for each in self.series:
            xs, ys = [x for x, _ in each.points], [y for _, y in each.points]
            if each.kind == "points":
                axes.scatter(xs, ys, s=12, marker=each.marker, alpha=0.7, label=each.label)
            elif each.kind == "steps":
                axes.step(xs, ys, where="post", label=each.label)
            else:
                axes.plot(xs, ys, marker=each.marker, markersize=3.5, linewidth=1.2, label=each.label)
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        axes.set_ylim(bottom=0)
        if self.ticks is not None:
            axes.set_xticks(range(len(self.ticks)), self.ticks)
        if any(each.label for each in self.series):
            axes.legend(frameon=False)


@dataclass(frozen=True)
class Chart:
    """Panels beside each other under a title."""

    title: str
    panels: Sequence[Panel]

    def draw(self, path: Path) -> None:
        """Writes the picture to `path`, which passed `check_plot`."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5) if len(self.panels) == 1 else (12, 4), layout="constrained")
        figure.suptitle(self.title)
        for panel, axes in zip(self.panels, figure.subplots(1, len(self.panels), squeeze=False).flat, strict=True):
            panel.draw(axes)
        figure.savefig(path, dpi=150)


def check_plot(path: Path) -> None:
    """ConfigError if no picture could be written to `path`; to be called before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install ostinato[plot]")
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix.lstrip(".").lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(f"--plot {path} should end in .png, .svg or .pdf, which says the format")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path} should lie in a directory that exists")
