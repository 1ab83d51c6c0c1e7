"""Share of a machine that each replica may take, decided before any is started: without ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, Remedy
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.device.detect import detect
from ostinato.plan.fitting.settle import utilization
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.search import largest


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
    def engine_settings(self) -> dict[str, Any]:
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
    devices = f"{there_are} {kind}{'' if there_are == 1 else 's'}"
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
    return len(list(root.glob("proc/driver/nvidia/gpus/*/information")))
