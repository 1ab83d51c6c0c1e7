"""A picture of a server's latencies: as distributions, or against the load. matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LATENCIES = {
    "time_to_first_token": "time to first token, ms",
    "time_per_output_token": "time per output token, ms",
    "end_to_end": "whole request, s",
}


def plot_serve(report: Mapping[str, Any], path: Path) -> None:
    """Draws a report of `ostinato bench serve`: of one run how many requests took at most how long; of several the
    percentiles and the throughput of each."""
    from matplotlib.figure import Figure

    results = report["results"]
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(_title(report))
    if len(results) == 1:
        _draw_distributions(figure.subplots(1, 3, sharey=True), results[0])
    else:
        _draw_sweep(figure.subplots(1, 3), results)
    figure.savefig(path, dpi=150)


def _draw_distributions(panels: Sequence[Any], result: Mapping[str, Any]) -> None:
    for axes, (name, label) in zip(panels, LATENCIES.items(), strict=True):
        values = sorted(_in_unit(name, each[name]) for each in result["outcomes"] if _counts(each, name))
        axes.step([0.0, *values], [i / max(1, len(values)) for i in range(len(values) + 1)], where="post")
        axes.set(xlabel=label, xlim=(0, None), ylim=(0, 1))
    panels[0].set_ylabel("part of the requests")


def _draw_sweep(panels: Sequence[Any], results: Sequence[Mapping[str, Any]]) -> None:
    """At equal distances, since a rate may be infinite."""
    is_open = results[0]["rate"] is not None
    loads = [each["rate"] if is_open else each["concurrency"] for each in results]
    for axes, name in zip(panels, ("time_to_first_token", "time_per_output_token"), strict=False):
        for percentile in ("p50", "p90", "p99"):
            drawn = [(i, _in_unit(name, each[name][percentile])) for i, each in enumerate(results) if each[name]]
            if drawn:
                axes.plot(*zip(*drawn, strict=True), marker="o", markersize=3.5, label=percentile)
        axes.set_ylabel(LATENCIES[name])
        axes.legend(frameon=False)
    rates, places = panels[2], range(len(results))
    rates.plot(places, [each["requests_per_second"] for each in results], marker="o", markersize=3.5, label="complete")
    if results[0]["goodput"] is not None:
        rates.plot(places, [each["goodput"] for each in results], marker="s", markersize=3.5, label="within deadline")
    rates.set_ylabel("requests per second")
    rates.legend(frameon=False)
    for axes in panels:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xticks(places, [load if load == "inf" else f"{load:g}" for load in loads])
        axes.set_xlabel("arrivals per second" if is_open else "requests at a time")


def _counts(outcome: Mapping[str, Any], name: str) -> bool:
    return outcome["error"] is None and outcome[name] is not None


def _in_unit(name: str, seconds: float) -> float:
    return seconds if name == "end_to_end" else seconds * 1e3


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    prompt = "word problems" if settings["prompt_tokens"] is None else f"{settings['prompt_tokens']} prompt tokens"
    return f"{Path(report['server']['model']).name}, {prompt}, {settings['output_tokens']} new"
