"""Layout of a Ray application, without ray: shares of a machine, names, and options of the engine deployment.

The share of each replica is decided before any is started. Engines and fronts of one application find each other by
name. The number of replicas for Ray Serve's autoscaler follows from their loads.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, Remedy
from ostinato.files import is_file, matches
from ostinato.json_io import JsonObject
from ostinato.kv_cache.offload.save_restore import SAVE_PATIENCE
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.fitting.resolve import utilization
from ostinato.plan.limits import largest
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.serve.settings import ServeSettings
from ostinato.units import counted


@dataclass(frozen=True)
class ReplicaLayout:
    """One replica of several: its settings, its plan, and its share of a node."""

    config: EngineConfig
    """The user's settings, and the replica's part of what is shared."""
    plan: Plan
    num_cpus: int
    """Cores of a CPU's replica; 1 for a GPU's, whose core waits for the GPU."""
    num_gpus: int

    @property
    def engine_settings(self) -> JsonObject:
        """The settings that were given, as plain data."""
        return self.config.model_dump(mode="json", include=self.config.model_fields_set)


def lay_out(
    config: EngineConfig, replicas: int, on_one_machine: bool, device: DeviceSpec | None = None, num_gpus: int = 0
) -> ReplicaLayout:
    """Return the layout of `replicas` engines on one machine or on a cluster.

    On one machine, `device` (open: this one) with `num_gpus` GPUs, they share its cores and memory. On a cluster each
    has what the node gives it, and this machine stands for the nodes. Raises ConfigError if there are too few devices,
    CapacityError if their memory is too small, both with numbers of replicas that work.
    """
    device = detect(config.device) if device is None else device
    model = load_spec(config)
    ranks = config.tensor_parallel_size
    shared = replicas if on_one_machine else 1
    if device.kind == "cuda":
        if on_one_machine:
            _check_devices(replicas, ranks, num_gpus, "GPU")
        return ReplicaLayout(config, make_plan(config, model, device), 1, ranks)
    if on_one_machine:
        _check_devices(replicas, ranks, device.cores, "core")
    plan = _plan_of_part(config, model, device, shared)
    threads = plan.settings.threads or 1
    if shared > 1:
        part = utilization(config, device) / shared
        config = config.with_settings(memory_utilization=part, threads=threads)
    else:
        config = config.with_settings(threads=threads)
    return ReplicaLayout(config, plan, threads * ranks, 0)


def _check_devices(replicas: int, ranks: int, there_are: int, kind: str) -> None:
    if replicas * ranks <= there_are:
        return
    each = f" of {ranks} ranks each" if ranks > 1 else ""
    devices = counted(there_are, kind)
    remedies = [Remedy("replicas", there_are // ranks)] if there_are >= ranks else []
    if ranks > 1 and there_are >= replicas:
        remedies.append(Remedy("tensor_parallel_size", 1))
    raise ConfigError(
        f"{replicas} replicas{each} need {replicas * ranks} {kind}s, and this machine has {devices}", remedies
    )


def _plan_of_part(config: EngineConfig, model: ModelSpec, device: DeviceSpec, shared: int) -> Plan:
    """Return the plan of one of `shared` replicas of a machine, which has that part of its memory and cores."""

    def plan(count: int) -> Plan:
        part = replace(device, memory_bytes=device.memory_bytes // count, cores=max(1, device.cores // count))
        return make_plan(config, model, part)

    def fits(count: int) -> bool:
        try:
            plan(count)
        except CapacityError:
            return False
        return True

    try:
        return plan(shared)
    except CapacityError as error:
        if shared == 1:
            raise
        fewer = largest(1, shared - 1, fits)
        remedies = [*([] if fewer is None else [Remedy("replicas", fewer)]), *error.remedies]
        message = f"each of {shared} replicas has a part of this machine's memory: {error.message}"
        raise CapacityError(message, remedies) from None


def count_gpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Count the GPUs that this process may use, as far as the driver tells without torch."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len([gpu for gpu in matches(root / "proc/driver/nvidia/gpus", "*") if is_file(gpu / "information")])


NAMESPACE = "ostinato"
"""Ray's namespace of the engines' actors."""


def app_name(model_name: str) -> str:
    """Return the name of the application that serves a model: letters, digits and dashes."""
    return f"ostinato-{re.sub('[^A-Za-z0-9]+', '-', model_name).strip('-').lower() or 'model'}"


def actor_prefix(app: str) -> str:
    """Return the prefix of the names of an application's engines."""
    return f"{app}:engine:"


HEALTH_SECONDS = 2
"""Seconds between two checks of a replica's health."""
END_SECONDS = 10
"""Seconds that a replica has to end, besides those in which it drains and writes files of its prefix cache."""


def deployment_options(layout: ReplicaLayout, settings: ServeSettings) -> JsonObject:
    """Return the options of the engine deployment, as Ray Serve names them."""
    replicas, most = settings.replicas or 1, settings.most_replicas
    numbers: JsonObject = {"num_replicas": replicas}
    if most > replicas:
        policy = {"policy_function": "ostinato.serve.ray.layout:wanted_replicas"}
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


TARGET = 0.8
"""Target of a replica's mean load, as a share of its capacity."""


def wanted_replicas(context: Any) -> tuple[int, JsonObject]:
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


def _by_replica(requests: dict[object, float], slots: dict[object, float]) -> list[tuple[float, float]]:
    return [(requests.get(name, 0.0), slots.get(name, 0.0)) for name in requests.keys() | slots.keys()]
