"""The figures of the encoder's benchmark: pure functions of seconds that were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WAYS = ("eager", "graph")
STATISTICS = ("mean", "p50", "p99")


@dataclass(frozen=True)
class ArrivalTimes:
    """Seconds until the images of one arrival were encoded: entry i of both was measured in turn i."""

    eager: Sequence[float]
    graph: Sequence[float]


def latency_figures(times: Sequence[ArrivalTimes]) -> dict[str, Any]:
    """Latencies over all arrivals and turns, eager and with graphs, in milliseconds, and `speed`: eager over graphs,
    above 1 where graphs are faster. `least` is made of each arrival's shortest times: what else the machine does makes
    one longer, never shorter."""
    every = {way: [second for one in times for second in getattr(one, way)] for way in WAYS}
    least = {way: [min(getattr(one, way)) for one in times] for way in WAYS}
    return {"arrivals": len(times), **_figures(every), "least": _figures(least)}


def _figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    figures = {way: spread_ms(seconds[way]) for way in WAYS}
    speed = {name: figures["eager"][name] / figures["graph"][name] for name in STATISTICS}
    return {"eager_ms": figures["eager"], "graph_ms": figures["graph"], "speed": speed}


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile (nearest rank), in milliseconds."""
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(ordered) * 1e3,
        "p50": statistics.median(ordered) * 1e3,
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1] * 1e3,
    }


def point_of(tokens: int, images: int, times: ArrivalTimes) -> dict[str, Any]:
    """One arrival: what it brought, and its shortest times."""
    return {
        "tokens": tokens,
        "images": images,
        "eager_ms": min(times.eager) * 1e3,
        "graph_ms": min(times.graph) * 1e3,
    }


def share_of_padding(counts: Mapping[str, Any]) -> float | None:
    """Padding over all that graphs computed, from the counts of packs; None if no graph ran."""
    padded = sum(one["tokens"] + one["padding"] for one in counts["budgets"])
    return counts["padding"] / padded if padded else None
