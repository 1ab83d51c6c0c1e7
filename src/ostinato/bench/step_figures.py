"""The figures of decode steps that ran with a graph and without: pure functions of seconds that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ostinato.plan.graphs.coverage import StepMode

Calls = Sequence[tuple[str, float]]
"""(name, seconds) of every call of a step, in order."""
Way = Literal["eager", "graph"]
WAYS = ("eager", "tape", "cuda")
"""How a step can run, as figures name it."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one decode step of `rows` rows, done again and again both ways in turns.

    Entry i of `eager` and entry i of `graph` were measured right after each other.
    """

    rows: int
    eager: Sequence[float]
    graph: Sequence[float]

    def median(self, way: Way) -> float:
        return statistics.median(self.eager if way == "eager" else self.graph)

    def least(self, way: Way) -> float:
        return min(self.eager if way == "eager" else self.graph)


@dataclass(frozen=True)
class KernelShares:
    """The part of a step's time that is spent in `ops/` kernels, from 0 to 1."""

    eager: float
    graph: float


def step_figures(
    times: StepTimes,
    mode: StepMode,
    size: int | None,
    backend: str,
    shares: KernelShares | None = None,
    floor: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Medians of one batch size in milliseconds, None for what was not measured.

    `speed` is that with the graph over that without, the median over pairs of neighbours in time: above 1 the graph is
    faster. `least_ms` are the shortest times. `kernel_ms` and `rest_ms` split both medians by `shares`, which a pass
    of its own measured. A step without a graph, whose `size` is None, has figures of its eager form only.
    """
    has_graph = size is not None
    eager, graph = times.median("eager") * 1e3, times.median("graph") * 1e3 if has_graph else None
    speeds = [before / after for before, after in zip(times.eager, times.graph, strict=True)] if has_graph else []
    least = {"eager": times.least("eager") * 1e3} | ({backend: times.least("graph") * 1e3} if has_graph else {})
    split: dict[str, Any] = {"kernel_ms": None, "rest_ms": None}
    if shares is not None:
        parts = {"eager": (eager, shares.eager)} | ({} if graph is None else {backend: (graph, shares.graph)})
        split["kernel_ms"] = {way: total * share for way, (total, share) in parts.items()}
        split["rest_ms"] = {way: total * (1 - share) for way, (total, share) in parts.items()}
    return {
        "rows": times.rows,
        "eager_ms": eager,
        "tape_ms": graph if backend == "tape" else None,
        "cuda_ms": graph if backend == "cuda" else None,
        "speed": statistics.median(speeds) if speeds else None,
        "least_ms": least,
        "mode": mode,
        "graph_rows": size,
        "padding": None if size is None else size - times.rows,
        **split,
        "floor": floor,
    }


def overall_figures(steps: Sequence[Mapping[str, Any]], backend: str) -> dict[str, Any]:
    """The speed with graphs over that without, and the largest cliff of each way, by the times in `steps`."""
    cliffs = {way: largest_cliff(steps, f"{way}_ms") for way in ("eager", backend)}
    return {"ratio": speed_ratio(steps), "cliff": cliffs}


def speed_ratio(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The speed with graphs over that without, over all batch sizes that have one: median, worst and where; None if
    none has."""
    speeds = {step["rows"]: step["speed"] for step in steps if step["speed"] is not None}
    if not speeds:
        return None
    worst = min(speeds, key=lambda rows: speeds[rows])
    return {"median": statistics.median(speeds.values()), "worst": speeds[worst], "worst_rows": worst}


def least_steps(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps with their shortest times in place of the medians, for the figures that are made of them: what else
    the machine does makes a step longer, never shorter."""
    found = []
    for step in steps:
        least = step["least_ms"]
        graph = next((milliseconds for way, milliseconds in least.items() if way != "eager"), None)
        speed = None if graph is None else least["eager"] / graph
        found.append({"rows": step["rows"], "speed": speed, **{f"{way}_ms": least.get(way) for way in WAYS}})
    return found


def largest_cliff(steps: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any] | None:
    """How many times longer than its neighbour a batch size takes, up or down, where that is most; None if no two
    neighbours were measured. `kind` is the figure to look at, such as `eager_ms`."""
    found = [
        {"ratio": max(one[kind] / other[kind], other[kind] / one[kind]), "from": one["rows"], "to": other["rows"]}
        for one, other in pairwise(steps)
        if one[kind] is not None and other[kind] is not None
    ]
    return max(found, key=lambda cliff: cliff["ratio"], default=None)


def capture_figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What capture took, from `plan.measured["graphs"]`. Bytes count the persistent buffers and what graphs share."""
    graphs, seconds = measured["captured"], measured["capture_seconds"]
    return {
        "seconds": seconds,
        "graphs": graphs,
        "planned_bytes": measured["planned_bytes"],
        "observed_bytes": measured["observed_bytes"],
        "seconds_per_graph": seconds / graphs,
        "bytes_per_graph": measured["observed_bytes"] / graphs,
    }
