"""Explanations of a fit: which values were lowered, what the split assumes, or why nothing fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from ostinato.plan.decision import Decision
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.encoder.memory import EncoderMemory
from ostinato.plan.fitting.resolve import DEFAULT_CPU_CACHE
from ostinato.plan.graphs.capture_sizes import LadderLimit
from ostinato.plan.limits import Limits
from ostinato.plan.memory.split import (
    MAX_CACHED_TOKENS,
    MemoryBudget,
    MemoryPlan,
    cache_bytes_left,
    cache_need,
    expected_prefix,
    prefixes_that_fit,
    window_blocks_of,
)
from ostinato.units import format_bytes


def limit_decisions(before: Iterable[Decision], wanted: Limits, limits: Limits, memory: MemoryPlan) -> list[Decision]:
    """Return the decisions `before` and the lowered values, merged into one where a setting changed twice."""
    changes = {decision.topic: decision for decision in before}
    others = "activations, graphs and the encoder's cache" if memory.encoder_cache else "activations and graphs"
    reason = (
        f"the most that fits into {format_bytes(memory.available)} beside {format_bytes(memory.weights)} of "
        f"weights and {format_bytes(memory.beside_cache - memory.weights)} of {others}"
    )
    for setting, last in asdict(limits).items():
        first = getattr(wanted, setting)
        if first == last:
            continue
        earlier = changes.get(setting)
        if earlier is None:
            changes[setting] = Decision(setting, first, last, reason)
        else:
            changes[setting] = replace(earlier, effective=last, reason=f"{earlier.reason}; then {reason}")
    return list(changes.values())


def cache_decisions(budget: MemoryBudget, memory: MemoryPlan, limits: Limits) -> list[Decision]:
    """Return the decisions on the cache.

    They say that it is smaller than by default, or has fewer blocks than there is room for, and what its split assumes.
    """
    decisions: list[Decision] = []
    room = cache_bytes_left(budget, memory.activations, memory.beside_cache - memory.weights - memory.activations)
    if budget.cache_size is not None and room < budget.cache_size:
        others = "activations, graphs and images" if memory.encoder_cache else "activations and graphs"
        reason = f"the default is more than weights, {others} leave of the memory"
        decisions.append(Decision("cache_memory", budget.cache_size, room, reason))
    if memory.kv_block and not budget.holds_prefixes:
        elsewhere = memory.num_slots * memory.state_slot + memory.num_window_blocks * memory.window_block
        possible = (room - elsewhere) // memory.kv_block
        if possible > memory.num_blocks:
            reason = "no more can be used: the null block, and max_num_seqs requests of max_model_len tokens"
            decisions.append(Decision("num_blocks", possible, memory.num_blocks, reason))
    if memory.expected_prefix_tokens is not None:
        decisions += _prefix_decisions(budget, memory, limits, room)
    return decisions


def _prefix_decisions(budget: MemoryBudget, memory: MemoryPlan, limits: Limits, room: int) -> list[Decision]:
    """Return what the split for prefixes assumes, or that there is room for more than are worth planning for."""
    expected = expected_prefix(budget, limits.max_model_len)
    possible = expected * prefixes_that_fit(
        budget, room, limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens
    )
    if possible > memory.prefix_tokens:
        reason = f"the cache is planned for no more than {MAX_CACHED_TOKENS} tokens of prefixes"
        return [Decision("prefix_tokens", possible, memory.prefix_tokens, reason)]
    if budget.expected_prefix_tokens is not None or not (memory.kv_block and memory.state_slot):
        return []
    reason = "what running requests leave of the cache is split for prefixes of this mean length"
    return [Decision("expected_prefix_tokens", None, expected, reason)]


def why_graphs_are_smaller(memory: MemoryPlan, limits: Limits, reach: LadderLimit) -> str:
    """Return why open ladders reach no further than `reach`."""
    reason = f"beside larger graphs nothing fits into {format_bytes(memory.available)}"
    if reach.most_tokens is None:
        return f"{reason}; this is the default for max_num_seqs {limits.max_num_seqs}"
    return f"{reason}; larger batches run eagerly"


def even_if_lowered(wanted: Limits, limits: Limits) -> str:
    """Return a clause with the open values that were lowered in vain."""
    lowered = [
        f"{setting} at {limit}" for setting, limit in asdict(limits).items() if limit != getattr(wanted, setting)
    ]
    return f"even with {', '.join(lowered)}: " if lowered else ""


def explain(
    budget: MemoryBudget,
    activations: int,
    graphs: int,
    encoder: EncoderMemory,
    captured_tokens: int,
    limits: Limits,
    device: DeviceSpec,
) -> str:
    """Return the message that compares what is needed, part by part, with what is available."""
    need = cache_need(budget, limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens)
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
    if budget.window_block:
        window_blocks = window_blocks_of(budget, 1, limits.max_model_len, limits.max_num_batched_tokens)
        size = format_bytes(budget.window_block)
        parts.append(
            f"{window_blocks} window blocks of {size} for its window of {budget.window_block_window} and a step of "
            f"max_num_batched_tokens {limits.max_num_batched_tokens}"
        )
    what_for = " and ".join(parts)
    beside = budget.weights + graphs + encoder.total + activations
    # The default is the cause only if there is room for more.
    is_cause = budget.cache_is_given or beside + need <= budget.available
    if budget.cache_size is not None and need > budget.cache_size and is_cause:
        by_default = f", by default a quarter of the memory and at most {format_bytes(DEFAULT_CPU_CACHE)}"
        name = f"cache_memory{'' if budget.cache_is_given else by_default}"
        cache = f"the cache of {format_bytes(budget.cache_size)} ({name})"
        return f"{cache} is less than the {format_bytes(need)} that it must hold: {what_for}"
    cache = f"cache {format_bytes(need)} ({what_for})"
    if budget.cache_size is not None and budget.cache_is_given:
        need, cache = budget.cache_size, f"cache_memory {format_bytes(budget.cache_size)}"
    of_graphs = f"graphs {format_bytes(graphs)} (of up to {captured_tokens} tokens), " if graphs else ""
    if encoder.graphs:
        of_graphs += f"the encoder's graphs {format_bytes(encoder.graphs)} (encoder_token_budgets), "
    if encoder.cache:
        of_graphs += f"the encoder's cache {format_bytes(encoder.cache)} (encoder_cache_tokens), "
    return (
        f"{format_bytes(beside + need)} are needed, and {format_bytes(budget.available)} of the "
        f"{format_bytes(device.memory_bytes)} of {device.name} may be used: "
        f"weights {format_bytes(budget.weights)}, "
        f"activations {format_bytes(activations)} (max_num_batched_tokens {limits.max_num_batched_tokens}, "
        f"max_num_seqs {limits.max_num_seqs}), "
        f"{of_graphs}{cache}"
    )
