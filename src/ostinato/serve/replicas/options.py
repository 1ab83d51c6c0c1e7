"""The options of the engine deployment: numbers, resources, health and end. Without ray."""

from __future__ import annotations

from typing import Any

from ostinato.engine.process.async_engine import SAVE_PATIENCE
from ostinato.serve.replicas.layout import ReplicaLayout
from ostinato.serve.settings import ServeSettings

HEALTH_SECONDS = 2
"""Seconds between two checks of a replica's health."""
END_SECONDS = 10
"""Seconds that a replica has to end, besides those in which it drains and writes files of its prefix cache."""


def deployment_options(layout: ReplicaLayout, settings: ServeSettings) -> dict[str, Any]:
    """Return the options of the engine deployment, as Ray Serve names them."""
    replicas, most = settings.replicas or 1, settings.most_replicas
    numbers: dict[str, Any] = {"num_replicas": replicas}
    if most > replicas:
        policy = {"policy_function": "ostinato.serve.replicas.scaling:wanted_replicas"}
        numbers = {"autoscaling_config": {"min_replicas": replicas, "max_replicas": most, "policy": policy}}
    saves = SAVE_PATIENCE if layout.plan.cache_files is not None else 0
    resources = {"num_cpus": layout.num_cpus, **({"num_gpus": layout.num_gpus} if layout.num_gpus else {})}
    return {
        **numbers,
        "ray_actor_options": resources,
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": 30,
        "graceful_shutdown_timeout_s": settings.drain_timeout + saves + END_SECONDS,
        "max_constructor_retry_count": 3,
    }
