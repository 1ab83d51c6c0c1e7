"""Draws the chart of a benchmark's report: `python tools/plot_bench.py REPORT.json FILE.png`.

    ostinato bench graphs demo --json > steps.json && python tools/plot_bench.py steps.json steps.png

It draws reports of `ostinato bench graphs`, `bench encoder`, `bench serve` and `bench scale`, and the `report.json`
of `ostinato gpu-check`. FILE may end in .png, .svg or .pdf. It needs matplotlib: `pip install 'ostinato[plot]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.site_hook import colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = Mapping[str, Any]
LATENCIES = {
    "time_to_first_token": ("time to first token, ms", 1e3),
    "time_per_output_token": ("time per output token, ms", 1e3),
    "end_to_end": ("whole request, s", 1.0),
}
"""Latencies of a request: the label, and the number of its units in a second."""


def draw_graphs(report: Report, figure: Figure) -> None:
    """Draw step time against batch size, with the sizes of graphs marked."""
    machine, settings, backend = report["machine"], report["settings"], report["backend"]
    where = machine["cpu"] if settings["device"] == "cpu" else machine["device"]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    figure.suptitle(f"{Path(report['model']['name']).name}, {settings['dtype']}, {where}, {threads}")
    axes = _axes(figure, "rows of the decode step", "milliseconds")
    _mark(axes, sorted({step["graph_rows"] for step in report["steps"]} - {None}), "size of a graph")
    _line(axes, [(step["rows"], step["eager_ms"]) for step in report["steps"]], "eager")
    _line(axes, [(step["rows"], step[f"{backend}_ms"]) for step in report["steps"]], f"graph ({backend})", "s")
    axes.locator_params("x", integer=True)
    axes.legend(frameon=False)


def draw_encoder(report: Report, figure: Figure) -> None:
    """Draw latency against the tokens of an arrival, with the budgets of graphs marked."""
    figure.suptitle(f"encoder of {Path(report['model']['name']).name}, {report['settings']['dtype']}")
    axes = _axes(figure, "output tokens of an arrival", "milliseconds (shortest of all rounds)")
    _mark(axes, report["plan"]["token_budgets"], "budget of a graph")
    points = [point for result in report["results"].values() for point in result["points"]]
    for way, marker, label in (("eager_ms", "o", "eager"), ("graph_ms", "s", f"graphs ({report['backend']})")):
        xs, ys = [point["tokens"] for point in points], [point[way] for point in points]
        axes.scatter(xs, ys, s=12, marker=marker, alpha=0.7, label=label)
    axes.legend(frameon=False)


def draw_serve(report: Report, figure: Figure) -> None:
    """Draw the distributions of latencies of one run; of several their percentiles and throughput."""
    settings, results = report["settings"], report["results"]
    prompts = "word problems" if settings["prompt_tokens"] is None else f"{settings['prompt_tokens']} prompt tokens"
    figure.suptitle(f"{Path(report['server']['model']).name}, {prompts}, {settings['output_tokens']} new")
    if len(results) == 1:
        _draw_distributions(results[0], figure)
    else:
        _draw_sweep(results, figure)


def draw_gpu_check(report: Report, figure: Figure) -> None:
    """Draw the share of the bandwidth, and the time of a step, against the number of rows."""
    figure.suptitle(f"{report['device']['name']}{', a rehearsal' if report['note'] else ''}")
    models = list(dict.fromkeys(step["model"] for step in report["decode"]))
    shares = _axes(figure, "rows of the decode step", "part of bandwidth", 1, 2)
    times = _axes(figure, "rows of the decode step", "milliseconds", 2, 2)
    for model in models:
        steps = [step for step in report["decode"] if step["model"] == model]
        _line(shares, [(step["rows"], step["reached"]) for step in steps], model)
        for name, label, marker in (
            ("step_seconds", "step", "o"),
            ("eager_seconds", "eager", "s"),
            ("predicted_seconds", "predicted kernels", "^"),
        ):
            points = [(step["rows"], step[name] and step[name] * 1e3) for step in steps]
            _line(times, points, f"{model}, {label}", marker)
    for axes in (shares, times):
        if axes.get_lines():
            axes.legend(frameon=False)


def draw_scale(report: Report, figure: Figure) -> None:
    """Draw each cost's growth against its number: what should stay, and what a step may add, with n^1 beside them."""
    figure.suptitle(f"{Path(report['model']['name']).name}, {report['settings']['dtype']}, {report['machine']['cpu']}")
    kinds: dict[tuple[str, str], list[Report]] = {}
    for row in report["results"]:
        kinds.setdefault((row["cost"], row["by"]), []).append(row)
    for place, expected in enumerate(("n^0", "n^0 to n^1"), start=1):
        axes = _axes(figure, "number", f"growth (expected: {expected})", place, 2)
        most = 1.0
        for (cost, by), rows in kinds.items():
            if rows[0]["expected"] == expected:
                _line(axes, [(row["number"], row["growth"]) for row in rows], f"{cost} by {by}")
                most = max(most, *(row["growth"] for row in rows))
        axes.set(xscale="log", ylim=(0, 1.2 * most))
        axes.axhline(1, color="0.7", linestyle="--", label="n^0")
        axes.legend(frameon=False)


CHARTS: Mapping[str, tuple[Callable[[Report, Figure], None], int]] = {
    "graphs": (draw_graphs, 1),
    "encoder": (draw_encoder, 1),
    "serve": (draw_serve, 3),
    "scale": (draw_scale, 2),
    "gpu-check": (draw_gpu_check, 2),
}
"""Command of a report -> the function that draws it, and its number of panels."""


def _draw_distributions(result: Report, figure: Figure) -> None:
    for place, (name, (label, unit)) in enumerate(LATENCIES.items(), start=1):
        axes = _axes(figure, label, "part of the requests", place, 3)
        outcomes = [each for each in result["outcomes"] if each["error"] is None and each[name] is not None]
        xs = [0.0, *sorted(each[name] * unit for each in outcomes)]
        axes.step(xs, [number / max(1, len(outcomes)) for number in range(len(xs))], where="post")


def _draw_sweep(results: Sequence[Report], figure: Figure) -> None:
    """Draw results at equal distances, since a rate may be infinite."""
    label_of_load = "requests at a time" if results[0]["rate"] is None else "arrivals per second"
    loads = [each["concurrency"] if each["rate"] is None else each["rate"] for each in results]
    for place, name in enumerate(("time_to_first_token", "time_per_output_token"), start=1):
        label, unit = LATENCIES[name]
        axes = _axes(figure, label_of_load, label, place, 3)
        for percentile in ("p50", "p90", "p99"):
            _line(
                axes, [(x, each[name] and each[name][percentile] * unit) for x, each in enumerate(results)], percentile
            )
    axes = _axes(figure, label_of_load, "requests per second", 3, 3)
    _line(axes, [(x, each["requests_per_second"]) for x, each in enumerate(results)], "complete")
    if results[0]["goodput"] is not None:
        _line(axes, [(x, each["goodput"]) for x, each in enumerate(results)], "within deadline", "s")
    for axes in figure.axes:
        axes.set_xticks(range(len(loads)), [load if load == "inf" else f"{load:g}" for load in loads])
        axes.legend(frameon=False)


def _axes(figure: Figure, x_label: str, y_label: str, place: int = 1, of: int = 1) -> Axes:
    axes = figure.add_subplot(1, of, place, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    return axes


def _line(axes: Axes, points: Sequence[tuple[float, float | None]], label: str, marker: str = "o") -> None:
    """Draw a line through the points that were measured; nothing if there are none."""
    measured = [(x, y) for x, y in points if y is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), marker=marker, markersize=3.5, linewidth=1.2, label=label)
        axes.set_ylim(bottom=0)


def _mark(axes: Axes, places: Sequence[float], label: str) -> None:
    """Draw vertical lines."""
    for number, x in enumerate(places):
        axes.axvline(x, color="0.85", linewidth=1, zorder=0, label=None if number else label)


def line_colours() -> list[str]:
    """Return the colours of lines: those of the server's page, which stand out on a light ground."""
    light = {name: value.removeprefix("light-dark(").split(",")[0] for name, value in colours().items()}
    return [light[f"--{name}"] for name in ("accent", "second", "third", "fourth", "edge", "ink")]


def draw(report: Report, path: Path) -> None:
    """Write the chart of a report. SystemExit with the reason if it has none, or `path` cannot be written."""
    try:
        from matplotlib import cycler, rc_context
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("matplotlib is not installed: pip install 'ostinato[plot]'")
    command = str(report.get("command"))
    if command not in CHARTS:
        sys.exit(f"a report of {command} has no chart; those of {', '.join(CHARTS)} have one")
    draw_report, panels = CHARTS[command]
    figure = Figure(figsize=(8, 4.5) if panels == 1 else (12, 4), layout="constrained")
    with rc_context({"axes.prop_cycle": cycler(color=line_colours())}):
        draw_report(report, figure)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        sys.exit(f"the chart cannot be written to {path}, which should end in .png, .svg or .pdf: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="what the command printed with --json")
    parser.add_argument("chart", type=Path, help="the picture to write")
    arguments = parser.parse_args()
    try:
        report = json.loads(arguments.report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.report} is no report of a benchmark: {error}")
    draw(report, arguments.chart)


if __name__ == "__main__":
    main()
