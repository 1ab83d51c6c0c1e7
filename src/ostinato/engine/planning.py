"""Planning without an engine: what one would do with a model on this machine, or on another. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, Remedy
from ostinato.models.checkpoint import load_spec
from ostinato.plan.device.detect import find_device
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.remedies import min_memory
from ostinato.units import exact_bytes, format_bytes, parse_bytes

if TYPE_CHECKING:
    from os import PathLike


def plan_model(
    model: str | PathLike[str] = "demo",
    *,
    device: str = "auto",
    device_memory: int | str | None = None,
    **settings: Any,
) -> Plan:
    """Return what an engine would do with a model, as `ostinato plan` shows it. No weight is loaded.

        plan_model("demo", device="l4-24gb", max_num_seqs=64).memory.num_slots

    `device` is auto, cpu or cuda for this machine, or a GPU's name, such as h200-141gb; `device_memory`, in bytes or as
    40GiB, takes the place of its memory. The other settings are those of `LLM`. Raises ModelError, ConfigError, or a
    CapacityError, whose remedies have been planned.
    """
    config = EngineConfig(model=model, **settings)
    return plan_on(config, load_spec(config), device_of(device, device_memory), device_memory is not None)


def device_of(name: str, memory: int | str | None = None, setting: str = "device_memory") -> DeviceSpec:
    """Return a device by its name, with another memory if one is given: as `setting`, in messages.

    ConfigError for a name or a size that is none.
    """
    device = find_device(str(name))  # torch.device("cpu") too
    if memory is None:
        return device
    try:
        size = parse_bytes(str(memory))
    except ConfigError as error:
        raise ConfigError(f"{setting} {error.message}") from None
    source = f"{device.source}; memory as given, in place of {format_bytes(device.memory_bytes)}"
    return replace(device, memory_bytes=size, source=source)


def plan_on(config: EngineConfig, spec: ModelSpec, device: DeviceSpec, is_given_memory: bool = False) -> Plan:
    """Return the plan of an engine on a device. If its memory was given, a CapacityError says how much is needed."""
    try:
        return make_plan(config, spec, device)
    except CapacityError as error:
        least = min_memory(config, spec, device) if is_given_memory else None
        if least is None:
            raise
        also = f", or raise device_memory to at least {exact_bytes(least)}" if error.remedies else ""
        raise CapacityError(error.message + also, [*error.remedies, Remedy("device_memory", least)]) from None
