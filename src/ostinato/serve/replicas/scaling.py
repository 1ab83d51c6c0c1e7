"""Number of replicas for Ray Serve's autoscaler, from their loads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

TARGET = 0.8
"""Target of a replica's mean load, as a share of its capacity."""


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas, and no state: a policy of Ray Serve.

    Ray Serve applies bounds and delays after it.
    """
    metrics = context.aggregated_metrics or {}
    loads = [max(each) for each in _by_replica(metrics.get("requests", {}), metrics.get("slots", {}))]
    return replicas_for(loads, context.current_num_replicas), {}


def replicas_for(loads: Iterable[float], num_replicas: int) -> int:
    """Return the number of replicas that brings the mean of `loads` to TARGET.

    Each load is a share of one replica's capacity. Without any load, the number stays.
    """
    found = list(loads)
    if not found or not num_replicas:
        return num_replicas
    mean = sum(found) / len(found)
    return max(1, math.ceil(round(num_replicas * mean / TARGET, 6)))


def _by_replica(requests: dict[Any, float], slots: dict[Any, float]) -> list[tuple[float, float]]:
    return [(requests.get(name, 0.0), slots.get(name, 0.0)) for name in requests.keys() | slots.keys()]
