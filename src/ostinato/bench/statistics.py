"""Measured times, and statistics made of them: pure functions of plain numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.plan.graphs.coverage import StepMode

Calls = Sequence[tuple[str, float]]
"""Pairs (name, seconds) of every call of a step, in order."""
Way = Literal["eager", "graph"]
WAYS = ("eager", "graph")
STATISTICS = ("mean", "p50", "p99")


@dataclass(frozen=True)
class RoundTrace:
    """One round. Times are in seconds since its requests were added, all at once."""

    prompt_tokens: int
    """Prompt tokens of all requests together."""
    token_times: list[list[float]]
    """Times of the output tokens, [requests][output tokens]."""
    step_ends: list[float]
    outputs: tuple[tuple[int, ...], ...] = ()
    """Output tokens of each request."""

    @property
    def prefill_end(self) -> float:
        """Time at which every request had its first token."""
        return max(times[0] for times in self.token_times)

    @property
    def end(self) -> float:
        return self.step_ends[-1]

    @property
    def output_tokens(self) -> int:
        return sum(len(times) for times in self.token_times)

    @property
    def decode_tokens(self) -> int:
        """Tokens after the time at which every request had its first one."""
        return sum(time > self.prefill_end for times in self.token_times for time in times)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the time at which every request had its first one."""
        return self.decode_tokens / (self.end - self.prefill_end)

    @property
    def decode_step_seconds(self) -> list[float]:
        """Lengths of the steps after every request had its first token."""
        return [end - begin for begin, end in pairwise(self.step_ends) if end > self.prefill_end]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, least and greatest; None if there are no values."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def paired_ratio(values: Sequence[float], baseline: Sequence[float] | None) -> dict[str, float] | None:
    """Return the spread of each value over that of the baseline in the same round; None without a baseline."""
    if baseline is None:
        return None
    return spread([value / base for value, base in zip(values, baseline, strict=True)])


def median_ratio(ours: Mapping[str, float] | None, theirs: Mapping[str, float] | None) -> float | None:
    """Return the ratio of the medians of two spreads; None if one was not measured."""
    return None if ours is None or theirs is None else ours["median"] / theirs["median"]


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile of values in ascending order: the least value that `percent` of them do not exceed."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, 99th percentile (nearest rank) and greatest; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": nearest_rank(ordered, 99), "max": ordered[-1]}


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, percentiles (nearest rank) and greatest; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{percent}": nearest_rank(ordered, percent) for percent in (50, 90, 99)}
    return {"mean": statistics.fmean(ordered), **ranks, "max": ordered[-1]}


@dataclass(frozen=True)
class GraphStepTimes:
    """Seconds of one decode step of `rows` rows, repeated with and without graph, alternating.

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
    """Share of a step's time that is spent in `ops/` kernels, from 0 to 1."""

    eager: float
    graph: float


def step_figures(
    times: GraphStepTimes,
    mode: StepMode,
    size: int | None,
    backend: str,
    shares: KernelShares | None = None,
    floor: Mapping[str, object] | None = None,
) -> JsonObject:
    """Return the medians of one batch size in milliseconds, None for what was not measured.

    `speed` is the speed with the graph over that without, the median over pairs of neighbours in time: above 1 the
    graph is faster. `least_ms` are the shortest times. `kernel_ms` and `rest_ms` split both medians by `shares`, which
    a separate pass measured. A step without a graph, whose `size` is None, has measurements of its eager form only.
    """
    has_graph = size is not None
    eager, graph = times.median("eager") * 1e3, times.median("graph") * 1e3 if has_graph else None
    speeds = [before / after for before, after in zip(times.eager, times.graph, strict=True)] if has_graph else []
    least = {"eager": times.least("eager") * 1e3} | ({backend: times.least("graph") * 1e3} if has_graph else {})
    split: JsonObject = {"kernel_ms": None, "rest_ms": None}
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


def overall_figures(steps: Sequence[Mapping[str, object]], backend: str) -> JsonObject:
    """Return the speed with graphs over that without, and the largest cliff of each, by the times in `steps`."""
    cliffs = {way: largest_cliff(steps, f"{way}_ms") for way in ("eager", backend)}
    return {"ratio": speed_ratio(steps), "cliff": cliffs}


def speed_ratio(steps: Sequence[JsonMapping]) -> JsonObject | None:
    """Return the speed with graphs over that without: median, worst and where; None if no batch size has graphs."""
    speeds = {step["rows"]: step["speed"] for step in steps if step["speed"] is not None}
    if not speeds:
        return None
    worst = min(speeds, key=lambda rows: speeds[rows])
    return {"median": statistics.median(speeds.values()), "worst": speeds[worst], "worst_rows": worst}


def min_steps(steps: Sequence[JsonMapping]) -> list[dict[str, object]]:
    """Return the steps with their shortest times in place of the medians, for statistics of them.

    Other work on the machine makes a step longer, never shorter.
    """
    shortest = []
    for step in steps:
        least = step["least_ms"]
        graph = next((milliseconds for way, milliseconds in least.items() if way != "eager"), None)
        speed = None if graph is None else least["eager"] / graph
        shortest.append(
            {"rows": step["rows"], "speed": speed, **{f"{way}_ms": least.get(way) for way in ("eager", "tape", "cuda")}}
        )
    return shortest


def largest_cliff(steps: Sequence[JsonMapping], kind: str) -> JsonObject | None:
    """Return the largest ratio of the times of two neighbouring batch sizes, up or down.

    Return None if no two neighbours were measured. `kind` names the time to compare, such as `eager_ms`.
    """
    cliffs = [
        {"ratio": max(one[kind] / other[kind], other[kind] / one[kind]), "from": one["rows"], "to": other["rows"]}
        for one, other in pairwise(steps)
        if one[kind] is not None and other[kind] is not None
    ]
    return max(cliffs, key=lambda cliff: cliff["ratio"], default=None)


def capture_figures(measured: JsonMapping) -> JsonObject:
    """Return time and memory of capture, from `plan.measured["graphs"]`.

    Bytes count the persistent buffers and what graphs share.
    """
    graphs, seconds = measured["captured"], measured["capture_seconds"]
    return {
        "seconds": seconds,
        "graphs": graphs,
        "planned_bytes": measured["planned_bytes"],
        "observed_bytes": measured["observed_bytes"],
        "seconds_per_graph": seconds / graphs,
        "bytes_per_graph": measured["observed_bytes"] / graphs,
    }


@dataclass(frozen=True)
class ArrivalTimes:
    """Seconds until the images of one arrival were encoded: entry i of both was measured in round i."""

    eager: Sequence[float]
    graph: Sequence[float]


def arrival_figures(times: Sequence[ArrivalTimes]) -> JsonObject:
    """Return latencies over all arrivals and rounds, eager and with graphs, in milliseconds, and `speed`.

    `speed` is eager over graphs, above 1 if graphs are faster. `least` is made of each arrival's shortest times: other
    work on the machine makes a time longer, never shorter.
    """
    every = {way: [second for one in times for second in getattr(one, way)] for way in WAYS}
    least = {way: [min(getattr(one, way)) for one in times] for way in WAYS}
    return {"arrivals": len(times), **_figures(every), "least": _figures(least)}


def _figures(seconds: Mapping[str, Sequence[float]]) -> JsonObject:
    figures = {way: spread_ms(seconds[way]) for way in WAYS}
    speed = {name: figures["eager"][name] / figures["graph"][name] for name in STATISTICS}
    return {"eager_ms": figures["eager"], "graph_ms": figures["graph"], "speed": speed}


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median and 99th percentile (nearest rank), in milliseconds."""
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(ordered) * 1e3,
        "p50": statistics.median(ordered) * 1e3,
        "p99": nearest_rank(ordered, 99) * 1e3,
    }


def point_of(tokens: int, images: int, times: ArrivalTimes) -> JsonObject:
    """Return one arrival's tokens and images, and its shortest times."""
    return {"tokens": tokens, "images": images, "eager_ms": min(times.eager) * 1e3, "graph_ms": min(times.graph) * 1e3}


def share_of_padding(counts: JsonMapping) -> float | None:
    """Return the padding over all that graphs computed, from the counts of packs; None if no graph ran."""
    padded = sum(one["tokens"] + one["padding"] for one in counts["budgets"])
    return counts["padding"] / padded if padded else None
