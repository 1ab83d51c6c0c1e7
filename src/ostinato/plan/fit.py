"""Fitting: which limits and which split of the memory a config comes to on a device, or why none fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, OstinatoError
from ostinato.plan.activations import activation_bytes
from ostinato.plan.capture import CaptureLadders
from ostinato.plan.capture_plan import choose_graph_mode, choose_ladders, largest_graphs
from ostinato.plan.coverage import FULL_MODES, GraphMode
from ostinato.plan.decision import Decision
from ostinato.plan.device import DeviceSpec
from ostinato.plan.graph_memory import LargestGraphs, graph_bytes
from ostinato.plan.kernels import KernelChoice, backend_of, choose_kernels
from ostinato.plan.limits import DEFAULT_MAX_NUM_SEQS, Limits, lower_limits, wanted_limits
from ostinato.plan.memory import (
    MOST_CACHED_TOKENS,
    Budget,
    MemoryPlan,
    cache_need,
    cache_room,
    expected_prefix,
    fit_memory,
    kv_block_bytes,
    prefixes_that_fit,
    slots_per_request,
    state_slot_bytes,
)
from ostinato.plan.model import ModelSpec
from ostinato.plan.passes import of_each_kind
from ostinato.plan.quantization_setting import with_quantization
from ostinato.plan.settings import choose_dtype, choose_ssm_state_dtype, choose_threads
from ostinato.plan.speculative import with_drafter
from ostinato.plan.state import StateCacheMode, choose_state_block_size, choose_state_cache_mode
from ostinato.plan.units import GiB, format_bytes

DEFAULT_MEMORY_UTILIZATION = {"cuda": 0.9, "cpu": 1.0}
DEFAULT_CPU_CACHE = 4 * GiB


@dataclass(frozen=True)
class Fit:
    """The outcome: what was lowered or chosen is in `decisions`."""

    dtype: str
    ssm_state_dtype: str
    state_cache_mode: StateCacheMode
    state_block_size: int
    limits: Limits
    memory: MemoryPlan
    kernels: dict[str, KernelChoice]
    graph_mode: GraphMode
    ladders: CaptureLadders
    decisions: tuple[Decision, ...]


class DoesNotFit(CapacityError):
    """A CapacityError together with what was tried, from which remedies are searched.

    `captured_tokens` are those of the largest graph; 0 if there is none.
    """

    def __init__(self, message: str, wanted: Limits, limits: Limits, budget: Budget, captured_tokens: int) -> None:
        super().__init__(message)
        self.captured_tokens = captured_tokens
        self.wanted = wanted
        self.limits = limits
        self.budget = budget


def fit(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Fit:
    """Raises DoesNotFit if nothing fits, ConfigError if given values contradict each other or the model."""
    dtype, decisions = choose_dtype(config, model)
    ssm_state_dtype, ssm_decisions = choose_ssm_state_dtype(config, model)
    mode = choose_state_cache_mode(config, model)
    state_block_size = choose_state_block_size(config, model)
    per_request = slots_per_request(config.num_speculative_tokens)
    wanted, limit_decisions = wanted_limits(config, model, device.kind, per_request)
    # A model without state needs no checkpoints to hit.
    hits = config.enable_prefix_caching and (mode.effective != "none" or not model.keeps_state)
    budget = _budget(config, model, device, dtype, ssm_state_dtype, hits)
    backend = backend_of(device.kind)
    kernels = choose_kernels(model, device, config.kernels, config.deterministic)
    graph_mode, graph_decisions = choose_graph_mode(config, kernels, backend)
    asked_rows = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.kind]
    choose_ladders(config, graph_mode, asked_rows, wanted, per_request)  # a contradiction is told before what fits
    # A step's peak is that of its greediest layer, so one of each kind is enough to find it.
    kinds = of_each_kind(model)
    native = [op for op, choice in kernels.items() if choice.implementation == "native"]
    threads = choose_threads(config, device) or 1

    def activations(limits: Limits) -> int:
        return activation_bytes(
            kinds,
            dtype,
            tokens=limits.max_num_batched_tokens,
            rows=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            gathers_states=device.kind == "cuda",
            tokens_per_row=per_request,
            native=native,
            threads=threads,
        )

    def captured(limits: Limits) -> LargestGraphs:
        return largest_graphs(config, graph_mode, asked_rows, limits, per_request)

    def graphs(limits: Limits) -> int:
        return graph_bytes(
            kinds,
            dtype,
            captured(limits),
            limits=limits,
            block_size=config.block_size,
            gathers_states=device.kind == "cuda" and graph_mode in FULL_MODES,
        )

    def fits(limits: Limits, rows: int) -> bool:
        room = cache_room(budget, activations(limits), graphs(limits))
        return cache_need(budget, rows, limits.max_model_len) <= room

    limits, _ = lower_limits(config, wanted, per_request, fits)
    tokens = captured(limits).most_tokens
    of_activations, of_graphs = activations(limits), graphs(limits)
    memory = fit_memory(budget, of_activations, limits.max_num_seqs, limits.max_model_len, of_graphs)
    if memory is None:
        message = _even_if_lowered(wanted, limits) + _explain(budget, of_activations, of_graphs, tokens, limits, device)
        raise DoesNotFit(message, wanted, limits, budget, tokens)
    if config.expected_prefix_tokens is not None and config.expected_prefix_tokens > limits.max_model_len:
        message = (
            f"max_model_len {limits.max_model_len} is the most that fits, and expected_prefix_tokens "
            f"{config.expected_prefix_tokens} is more"
        )
        raise DoesNotFit(message, wanted, limits, budget, tokens)
    ladders = choose_ladders(config, graph_mode, asked_rows, limits, per_request)
    return Fit(
        dtype,
        ssm_state_dtype,
        mode.effective,
        state_block_size,
        limits,
        memory,
        kernels,
        graph_mode,
        ladders,
        (
            *decisions,
            *ssm_decisions,
            *([mode] if mode.effective != config.state_cache_mode else []),
            *_limit_decisions(limit_decisions, wanted, limits, memory),
            *graph_decisions,
            *ladders.decisions,
            *_cache_decisions(budget, memory, limits),
        ),
    )


def fit_with(config: EngineConfig, model: ModelSpec, device: DeviceSpec, setting: str, value: Any) -> Fit | None:
    """The outcome with one setting changed; None if that contradicts the others or does not fit."""
    try:
        changed = config.with_settings(**{setting: value})
        return fit(changed, with_quantization(changed, with_drafter(changed, model)), device)
    except OstinatoError:
        return None


def _budget(
    config: EngineConfig, model: ModelSpec, device: DeviceSpec, dtype: str, ssm_state_dtype: str, hits: bool
) -> Budget:
    utilization = config.memory_utilization or DEFAULT_MEMORY_UTILIZATION[device.kind]
    cache_size = config.cache_memory
    if cache_size is None and device.kind == "cpu":
        cache_size = min(DEFAULT_CPU_CACHE, device.memory_bytes // 4)
    return Budget(
        available=int(device.memory_bytes * utilization),
        weights=model.weight_bytes(dtype) + (model.drafter.weight_bytes(dtype) if model.drafter is not None else 0),
        cache_size=cache_size,
        cache_is_given=config.cache_memory is not None,
        block_size=config.block_size,
        kv_block=kv_block_bytes(model, config.block_size, dtype),
        state_slot=state_slot_bytes(model, dtype, ssm_state_dtype),
        slots_per_request=slots_per_request(config.num_speculative_tokens),
        holds_prefixes=hits,
        expected_prefix_tokens=config.expected_prefix_tokens,
    )


def _limit_decisions(before: list[Decision], wanted: Limits, limits: Limits, memory: MemoryPlan) -> list[Decision]:
    """`before` and what was lowered to fit, as one decision where a setting was changed twice."""
    changes = {decision.topic: decision for decision in before}
    reason = (
        f"the most that fits into {format_bytes(memory.available)} beside {format_bytes(memory.weights)} of "
        f"weights and {format_bytes(memory.activations + memory.graphs)} of activations and graphs"
    )
    for setting in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        first, last = getattr(wanted, setting), getattr(limits, setting)
        if first == last:
            continue
        earlier = changes.get(setting)
        if earlier is None:
            changes[setting] = Decision(setting, first, last, reason)
        else:
            changes[setting] = replace(earlier, effective=last, reason=f"{earlier.reason}; then {reason}")
    return list(changes.values())


def _cache_decisions(budget: Budget, memory: MemoryPlan, limits: Limits) -> list[Decision]:
    decisions: list[Decision] = []
    room = cache_room(budget, memory.activations, memory.graphs)
    if budget.cache_size is not None and room < budget.cache_size:
        reason = "the default is more than weights, activations and graphs leave of the memory"
        decisions.append(Decision("cache_memory", budget.cache_size, room, reason))
    if memory.kv_block and not budget.holds_prefixes:
        possible = (room - memory.num_slots * memory.state_slot) // memory.kv_block
        if possible > memory.num_blocks:
            reason = "no more can be used: the null block, and max_num_seqs requests of max_model_len tokens"
            decisions.append(Decision("num_blocks", possible, memory.num_blocks, reason))
    if memory.expected_prefix_tokens is not None:
        decisions += _prefix_decisions(budget, memory, limits, room)
    return decisions


def _prefix_decisions(budget: Budget, memory: MemoryPlan, limits: Limits, room: int) -> list[Decision]:
    """What the split for prefixes assumes, or that there are more than are worth planning for."""
    expected = expected_prefix(budget, limits.max_model_len)
    possible = expected * prefixes_that_fit(budget, room, limits.max_num_seqs, limits.max_model_len)
    if possible > memory.prefix_tokens:
        reason = f"the cache is planned for no more than {MOST_CACHED_TOKENS} tokens of prefixes"
        return [Decision("prefix_tokens", possible, memory.prefix_tokens, reason)]
    if budget.expected_prefix_tokens is not None or not (memory.kv_block and memory.state_slot):
        return []
    reason = "what running requests leave of the cache is split for prefixes of this mean length"
    return [Decision("expected_prefix_tokens", None, expected, reason)]


def _even_if_lowered(wanted: Limits, limits: Limits) -> str:
    """Says which open values were lowered in vain."""
    lowered = [
        f"{setting} at {getattr(limits, setting)}"
        for setting in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        if getattr(limits, setting) != getattr(wanted, setting)
    ]
    return f"even with {', '.join(lowered)}: " if lowered else ""


def _explain(
    budget: Budget, activations: int, graphs: int, captured_tokens: int, limits: Limits, device: DeviceSpec
) -> str:
    """What is needed, part by part, against what there is."""
    need = cache_need(budget, limits.max_num_seqs, limits.max_model_len)
    parts = []
    if budget.state_slot:
        slots = limits.max_num_seqs * budget.slots_per_request + 1
        size = format_bytes(budget.state_slot)
        each = f", {budget.slots_per_request} each" if budget.slots_per_request > 1 else ""
        parts.append(f"{slots} slots of {size} for max_num_seqs {limits.max_num_seqs}{each}")
    if budget.kv_block:
        blocks = -(-limits.max_model_len // budget.block_size) + 1
        size = format_bytes(budget.kv_block)
        parts.append(f"{blocks} blocks of {size} for one request of max_model_len {limits.max_model_len}")
    what_for = " and ".join(parts)
    if budget.cache_size is not None and need > budget.cache_size:
        cache = f"the cache of {format_bytes(budget.cache_size)} (cache_memory)"
        return f"{cache} is less than the {format_bytes(need)} that it must hold: {what_for}"
    cache = f"cache {format_bytes(need)} ({what_for})"
    if budget.cache_size is not None and budget.cache_is_given:
        need, cache = budget.cache_size, f"cache_memory {format_bytes(budget.cache_size)}"
    total = budget.weights + graphs + activations + need
    of_graphs = f"graphs {format_bytes(graphs)} (of up to {captured_tokens} tokens), " if graphs else ""
    return (
        f"{format_bytes(total)} are needed, and {format_bytes(budget.available)} of the "
        f"{format_bytes(device.memory_bytes)} of {device.name} may be used: "
        f"weights {format_bytes(budget.weights)}, "
        f"activations {format_bytes(activations)} (max_num_batched_tokens {limits.max_num_batched_tokens}), "
        f"{of_graphs}{cache}"
    )
