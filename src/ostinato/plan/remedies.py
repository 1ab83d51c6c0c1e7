"""Remedies: for a config that does not fit, the nearest value of each setting that alone makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ostinato.config import EngineConfig
from ostinato.errors import OstinatoError, Remedy
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.fitting.fit import FitError, fit, fit_with
from ostinato.plan.fitting.resolve import DEFAULT_MEMORY_UTILIZATION
from ostinato.plan.graphs.coverage import PIECEWISE_MODES
from ostinato.plan.limits import largest, min_batched_tokens, min_model_len, smallest
from ostinato.plan.memory.split import cache_need
from ostinato.plan.model import ModelSpec
from ostinato.units import GiB, KiB, MiB, exact_bytes

Works = Callable[[str, Any], bool]

CACHE_STEPS = 32
"""Sizes of the cache that are tried before bisecting between two of them."""

MAX_MEMORY = 2**50
"""Upper bound, in bytes, of the search for a device memory that would do."""

MIN_VALUES: dict[str, Callable[[EngineConfig], int]] = {
    "max_num_seqs": lambda _: 1,
    "max_model_len": min_model_len,
    "expected_prefix_tokens": lambda _: 1,
    "encoder_max_items_per_batch": lambda _: 1,
    "encoder_cache_tokens": lambda _: 1,
}
"""Settings whose smaller values always fit where larger ones do, with their minimum."""

LOWERED_IF_GIVEN = ("expected_prefix_tokens", "encoder_max_items_per_batch", "encoder_cache_tokens")
"""Settings among them that are no reason why something does not fit, if they are left open."""


def working_remedies(
    remedies: Iterable[Remedy], config: EngineConfig, model: ModelSpec, device: DeviceSpec
) -> list[Remedy]:
    """Return `remedies` with values that also fit: each the nearest one that does, left out if there is none."""
    works = _works_with(config, model, device)
    working: list[Remedy] = []
    for remedy in remedies:
        if works(remedy.setting, remedy.value):
            working.append(remedy)
        elif remedy.setting == "speculative":
            working += remedy_fewer_drafts(config, works)
        elif remedy.setting == "encoder_token_budgets":
            working += _without_budgets(config, works)
        elif remedy.setting in MIN_VALUES:
            value = _largest_below(remedy.value, remedy.setting, config, works)
            working += [Remedy(remedy.setting, value)] if value is not None else []
    return working


def capacity_remedies(failure: FitError, config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> list[Remedy]:
    """Return one remedy for each setting that has a working value, with all other settings unchanged.

    Fewer bits of the weights, which change answers, are named only where nothing else is.
    """
    works = _works_with(config, model, device)
    values: dict[str, Any] = {
        # An open value was lowered to 1 already, so only a given one can be lowered.
        "max_num_seqs": _less_of_given("max_num_seqs", config, works),
        "max_num_batched_tokens": _max_num_batched_tokens(failure, config, works),
        "max_model_len": _largest_below(failure.limits.max_model_len, "max_model_len", config, works),
        **{name: _less_of_given(name, config, works) for name in LOWERED_IF_GIVEN},
        "memory_utilization": _memory_utilization(config, device, works),
        "cache_memory": _cache_memory(failure, config, works),
        "max_capture_size": _max_capture_size(failure, config, works),
        "graph_mode": "none" if failure.captured_tokens and works("graph_mode", "none") else None,
        "encoder_token_budgets": _smaller_budgets(config, works),
        "encoder_graph_mode": _no_encoder_graphs(config, model, works),
    }
    remedies = [Remedy(setting, value) for setting, value in values.items() if value is not None]
    if values["encoder_token_budgets"] is None:
        remedies += _without_budgets(config, works)
    remedies += remedy_fewer_drafts(config, works)
    return remedies or _fewer_bits(config, works)


def min_memory(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> int | None:
    """Return the smallest device memory in bytes with which it fits, or None if none is enough.

    It is in whole MiB, and more than the device has.
    """

    def fits(mebibytes: int) -> bool:
        try:
            fit(config, model, replace(device, memory_bytes=mebibytes * MiB))
        except OstinatoError:
            return False
        return True

    least = smallest(device.memory_bytes // MiB + 1, MAX_MEMORY // MiB, fits)
    return None if least is None else least * MiB


def advice(failure: FitError, remedies: list[Remedy], least: int | None) -> str:
    """Return the remedies as one sentence, such as "lower max_num_seqs to at most 512, or raise ...".

    Without remedies it names `least`, the memory that a device needs.
    """
    tried = {
        "max_num_seqs": failure.limits.max_num_seqs,
        "max_num_batched_tokens": failure.limits.max_num_batched_tokens,
        "max_model_len": failure.limits.max_model_len,
        "cache_memory": failure.budget.cache_size or 0,
        "max_capture_size": failure.captured_tokens,
    }
    phrases = []
    for remedy in remedies:
        if remedy.setting == "cache_memory":
            value = exact_bytes(remedy.value)
        else:
            value = remedy.value
        is_new = remedy.setting == "cache_memory" and not failure.budget.cache_is_given
        if remedy.setting == "quantization":
            phrases.append(f"quantise the weights, which changes answers a little: {remedy}")
        elif is_new or not isinstance(remedy.value, int | float) or remedy.setting == "speculative":
            phrases.append(str(Remedy(remedy.setting, value)))
        elif remedy.setting in LOWERED_IF_GIVEN or remedy.value < tried.get(remedy.setting, 0):
            phrases.append(f"lower {remedy.setting} to at most {value}")
        else:
            phrases.append(f"raise {remedy.setting} to at least {value}")
    if not phrases:
        if least is None:
            return "no single setting can make it fit, nor a larger device alone"
        return (
            f"no single setting can make it fit: it needs a device of at least {exact_bytes(least)} or a smaller model"
        )
    return ", or ".join(phrases)


def _works_with(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Works:
    return lambda setting, value: fit_with(config, model, device, setting, value) is not None


def _fewer_bits(config: EngineConfig, works: Works) -> list[Remedy]:
    """Return the remedy to quantise the weights, or to fewer bits than asked for: at most one."""
    kinds = [kind for kind in ("int8", "int4") if not str(config.quantization).startswith((kind, "int4"))]
    return [Remedy("quantization", kind) for kind in kinds if works("quantization", kind)][:1]


def _largest_below(value: int, setting: str, config: EngineConfig, works: Works) -> int | None:
    return largest(MIN_VALUES[setting](config), value - 1, partial(works, setting))


def _less_of_given(setting: str, config: EngineConfig, works: Works) -> int | None:
    value = getattr(config, setting)
    return None if value is None else _largest_below(value, setting, config, works)


def _smaller_budgets(config: EngineConfig, works: Works) -> list[int] | None:
    """Return the given budgets without the largest, dropping as few of them as needed."""
    budgets = list(config.encoder_token_budgets or ())
    kept = largest(1, len(budgets) - 1, lambda count: works("encoder_token_budgets", budgets[:count]))
    return None if kept is None else budgets[:kept]


def _without_budgets(config: EngineConfig, works: Works) -> list[Remedy]:
    """Return the remedy to leave the budgets open, if given ones prevent a fit: at most one."""
    is_given = config.encoder_token_budgets is not None
    return [Remedy("encoder_token_budgets", None)] if is_given and works("encoder_token_budgets", None) else []


def _no_encoder_graphs(config: EngineConfig, model: ModelSpec, works: Works) -> str | None:
    if model.vision is None or config.encoder_graph_mode == "none":
        return None
    return "none" if works("encoder_graph_mode", "none") else None


def _max_num_batched_tokens(failure: FitError, config: EngineConfig, works: Works) -> int | None:
    budget = failure.budget
    least = min_batched_tokens(config.max_num_seqs or 1, budget.slots_per_request, budget.block_size)
    highest = failure.limits.max_num_batched_tokens - 1
    return largest(least, highest, partial(works, "max_num_batched_tokens"))


def _max_capture_size(failure: FitError, config: EngineConfig, works: Works) -> int | None:
    """Return the largest capture size that works; None with given sizes, which contain their largest already."""
    if config.capture_sizes is not None or config.graph_mode not in PIECEWISE_MODES:
        return None
    return largest(1, failure.captured_tokens - 1, partial(works, "max_capture_size"))


def remedy_fewer_drafts(config: EngineConfig, works: Works) -> list[Remedy]:
    """Return a remedy with fewer drafts of the same method, or none if only that works: at most one remedy."""
    speculative = config.speculative
    if speculative is None:
        return []
    count = largest(
        1, speculative.num_speculative_tokens - 1, lambda count: works("speculative", speculative.with_tokens(count))
    )
    if count is not None:
        return [Remedy("speculative", speculative.with_tokens(count))]
    return [Remedy("speculative", None)] if works("speculative", None) else []


def _memory_utilization(config: EngineConfig, device: DeviceSpec, works: Works) -> float | None:
    """Return the utilization in whole percents, since finer tuning is not useful."""
    current = config.memory_utilization or DEFAULT_MEMORY_UTILIZATION[device.kind]
    percent = smallest(int(current * 100) + 1, 100, lambda value: works("memory_utilization", value / 100))
    return None if percent is None else percent / 100


def _cache_memory(failure: FitError, config: EngineConfig, works: Works) -> int | None:
    """Return the smallest size that works, if it is more than now; else the largest that leaves room for the rest."""
    budget, rows = failure.budget, config.max_num_seqs or 1
    # An open max_model_len is lowered if one request does not fit, but not to make room for slots: so the smallest
    # working size is between the needs of the shortest and the longest request.
    lengths = (config.max_model_len or budget.block_size, failure.wanted.max_model_len)
    tokens = (config.max_num_batched_tokens or 1, failure.wanted.max_num_batched_tokens)
    needs = (cache_need(budget, rows, *each) for each in zip(lengths, tokens, strict=True))
    low, high = (max(1, min(need, budget.available)) for need in needs)
    points = sorted({low + (high - low) * step // CACHE_STEPS for step in range(CACHE_STEPS + 1)})
    first = next((index for index, size in enumerate(points) if works("cache_memory", size)), None)
    if first is None:
        return None
    above = points[first - 1] + 1 if first else points[0]
    need = smallest(above, points[first], partial(works, "cache_memory"))
    if need is None:
        return None
    if budget.cache_size is None or budget.cache_size < need:
        return _round_size(need, works, up=True)
    # A default shrinks to the memory that is left, so the same size may work when it is given.
    highest = budget.cache_size - 1 if budget.cache_is_given else budget.cache_size
    most = largest(need, highest, partial(works, "cache_memory"))
    return None if most is None else _round_size(most, works, up=False)


def _round_size(size: int, works: Works, *, up: bool) -> int:
    """Return the size in the largest unit with a count of at least 100, or in KiB, rounded towards the side that works.

    Such a size is short to type and close to what is needed. It is returned unrounded if only that works.
    """
    for unit in (GiB, MiB, KiB):
        count = -(-size // unit) if up else size // unit
        if count >= (100 if unit > KiB else 1) and works("cache_memory", count * unit):
            return count * unit
    return size
