"""Which configurations of the cache the prefix benchmark compares, and what memory each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import make_plan
from ostinato.units import format_bytes

MODES = ("off", "none", "align", "all")
"""`off` is without prefix caching; the others are values of `state_cache_mode`."""

COMPARED = {
    "enable_prefix_caching": "--modes",
    "state_cache_mode": "--modes",
    "checkpoint_policy": "--checkpoint-policies",
    "eviction_policy": "--eviction-policies",
}
"""Engine settings whose values are compared -> the option that names those values."""


@dataclass(frozen=True)
class Variant:
    """One configuration of the cache. A policy that makes no difference in it is None."""

    mode: str
    checkpoint_policy: str | None = None
    eviction_policy: str | None = None

    @property
    def name(self) -> str:
        """For people; the default policy of eviction goes without saying."""
        branches = "+branches" if self.checkpoint_policy == "boundaries+branches" else ""
        return f"{self.mode}{branches}{', lru' if self.eviction_policy == 'lru' else ''}"

    def apply(self, config: EngineConfig) -> EngineConfig:
        if self.mode == "off":
            return config.with_settings(enable_prefix_caching=False)
        policies = {name: value for name, value in asdict(self).items() if name != "mode" and value is not None}
        return config.with_settings(state_cache_mode=self.mode, **policies)


def choose_variants(
    modes: Sequence[str] | None,
    checkpoint_policies: Sequence[str],
    eviction_policies: Sequence[str],
    model: ModelSpec,
    chunked_prefill: bool,
) -> list[Variant]:
    """Each mode with each policy that matters in it, once. `modes` None: all that differ on this model.

    Without state layers there are no checkpoints, so all modes but `off` are one, which is called `none`. With
    them nothing is found again in mode `none`, which leaves no policy to choose.
    """
    chosen: list[Variant] = []
    for mode in modes or _possible_modes(model, chunked_prefill):
        if mode == "off" or (mode == "none" and model.keeps_state):
            chosen.append(Variant(mode))
        elif model.keeps_state:
            chosen += [Variant(mode, *policies) for policies in product(checkpoint_policies, eviction_policies)]
        else:
            chosen += [Variant("none", None, eviction) for eviction in eviction_policies]
    return list(dict.fromkeys(chosen))


def find_baseline(variants: Sequence[Variant], model: ModelSpec) -> Variant | None:
    """The first that finds nothing: `off`, or `none` on a model with state layers; None if all may find
    something."""
    blind = ("off", "none") if model.keeps_state else ("off",)
    return next((variant for variant in variants if variant.mode in blind), None)


def check_open(config: EngineConfig) -> None:
    """ConfigError if a setting that is compared is given as well."""
    for name, option in COMPARED.items():
        if config.is_given(name):
            raise ConfigError(f"{name} is what the benchmark compares; leave it out and give {option}")


def configs_of(
    variants: Sequence[Variant], config: EngineConfig, model: ModelSpec, device: DeviceSpec
) -> dict[Variant, EngineConfig]:
    """The settings of each. Where `cache_memory` is open, all get an equal part: of what the plan would give one, or
    on a GPU of what all their weights and activations leave. CapacityError if that is too little.
    """
    configs = {variant: variant.apply(config) for variant in variants}
    plans = [make_plan(each, model, device) for each in configs.values()]
    count = len(configs)
    if count == 1 or config.is_given("cache_memory"):
        return configs
    part = max(plan.memory.cache for plan in plans) // count
    if device.kind == "cuda":
        memories = [plan.memory for plan in plans]
        beside = sum(memory.beside_cache for memory in memories)
        part = min(part * count, (memories[0].available - beside) // count)
    configs = {variant: each.with_settings(cache_memory=max(1, part)) for variant, each in configs.items()}
    try:
        for each in configs.values():
            make_plan(each, model, device)
    except CapacityError as error:
        message = f"{count} configurations leave each {format_bytes(max(0, part))} for its cache: compare fewer of them"
        raise CapacityError(f"{message} ({error.message})") from None
    return configs


def _possible_modes(model: ModelSpec, chunked_prefill: bool) -> list[str]:
    if not model.keeps_state:
        return ["off", "none"]
    modes = ["none"]
    if chunked_prefill:
        modes.append("align")
    if model.supports_all_checkpoints:
        modes.append("all")
    return modes
