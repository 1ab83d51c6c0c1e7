"""What a benchmark's report says of where it ran and what it ran."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ostinato.bench.workload import Workload
from ostinato.plain_data import to_plain
from ostinato.plan.plan import Plan

if TYPE_CHECKING:
    from ostinato.config import EngineConfig


def machine_facts(plan: Plan) -> dict[str, Any]:
    """The processor, the cores that the process may use, the threads that it uses, and torch's version."""
    import torch

    from ostinato.plan.device.detect import cpu_model, detect

    return {
        "cpu": cpu_model(),
        "cores": detect("cpu").cores,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": plan.device.name,
    }


def model_facts(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    return {
        "name": config.model,
        "architecture": plan.model.architecture,
        "parameters": plan.model.parameters,
        "random_weights": config.random_weights,
    }


def setting_facts(plan: Plan, workload: Workload) -> dict[str, Any]:
    """The engine's settings and the workload's."""
    return {**to_plain(plan.settings), **asdict(workload)}
