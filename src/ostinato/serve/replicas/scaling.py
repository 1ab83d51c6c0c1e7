"""How many replicas there should be, by what they hold: Ray Serve's autoscaler calls it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

TARGET = 0.8
"""The share of what a replica can hold that it should hold in the mean."""


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's policy: the number of replicas, and nothing to remember. Bounds and delays are applied after it."""
    metrics = context.aggregated_metrics or {}
    loads = [max(each) for each in _by_replica(metrics.get("requests", {}), metrics.get("slots", {}))]
    return replicas_for(loads, context.current_num_replicas), {}


def replicas_for(loads: Iterable[float], num_replicas: int) -> int:
    """How many replicas bring the mean of `loads`, each a share of what one can hold, to TARGET; as many as there are
    while none has told anything."""
    found = list(loads)
    if not found or not num_replicas:
        return num_replicas
    mean = sum(found) / len(found)
    return max(1, math.ceil(round(num_replicas * mean / TARGET, 6)))


def _by_replica(requests: dict[Any, float], slots: dict[Any, float]) -> list[tuple[float, float]]:
    return [(requests.get(name, 0.0), slots.get(name, 0.0)) for name in requests.keys() | slots.keys()]
