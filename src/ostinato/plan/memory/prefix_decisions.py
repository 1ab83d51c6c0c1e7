"""Decisions on the prefix cache beyond its sizes: settings without effect, and a cache that is too small."""

from __future__ import annotations

from functools import partial

from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.fitting.fit import FitResult, fit_with
from ostinato.plan.limits import largest, min_model_len, smallest
from ostinato.plan.remedies import remedy_fewer_drafts

CHECKPOINT_SETTINGS = ("state_block_size", "checkpoint_policy")
PREFIX_SETTINGS = ("eviction_policy", "expected_prefix_tokens", "max_pinned_checkpoints", "max_checkpoint_ttl")


def prefix_decisions(fitted: FitResult) -> list[Decision]:
    """Return the decisions on given settings without effect, and on a cache that has no room reserved for a prefix.

    The latter names the changes that would make room for one.
    """
    decisions = _idle_settings(fitted)
    memory = fitted.memory
    if memory.expected_prefix_tokens is not None and memory.prefix_tokens == 0:
        decisions.append(_no_place(fitted))
    return decisions


def _idle_settings(fitted: FitResult) -> list[Decision]:
    config, model = fitted.settled.config, fitted.settled.model
    idle: dict[str, str] = {}
    if not config.enable_prefix_caching:
        idle = dict.fromkeys((*CHECKPOINT_SETTINGS, *PREFIX_SETTINGS), "enable_prefix_caching is off")
    elif not model.keeps_state:
        idle = dict.fromkeys(CHECKPOINT_SETTINGS, "the model has no state layers")
    elif fitted.settled.state_cache_mode == "none":
        reason = "in mode none no state is kept, so no prompt can hit"
        idle = dict.fromkeys(("enable_prefix_caching", *CHECKPOINT_SETTINGS, *PREFIX_SETTINGS), reason)
    elif fitted.settled.state_block_size > fitted.limits.max_model_len:
        idle = {"state_block_size": f"no request is longer than max_model_len {fitted.limits.max_model_len}"}
    # Caching is on by default, so a cache without effect is reported even if the setting was not given.
    names = [name for name in idle if config.is_given(name) or name == "enable_prefix_caching"]
    return [no_effect(config, name, idle[name]) for name in names]


def _no_place(fitted: FitResult) -> Decision:
    held = []
    if fitted.memory.state_slot:
        held.append(f"the working slots of max_num_seqs {fitted.limits.max_num_seqs}")
    if fitted.memory.kv_block:
        held.append("the blocks of running requests")
    topic, what = ("num_checkpoints", "checkpoint") if fitted.memory.state_slot else ("prefix_tokens", "prefix")
    reason = f"{' and '.join(held)} leave no room for one {what}, so prefixes are kept only where that is idle"
    ways = _ways_to_one(fitted)
    needed = f"one {what} needs {', or '.join(ways)}" if ways else f"no single setting makes room for one {what}"
    return Decision(topic, None, 0, f"{reason}; {needed}")


def _ways_to_one(fitted: FitResult) -> list[str]:
    """Return changes of one setting each that make room for one prefix."""
    config, model, device = fitted.settled.config, fitted.settled.model, fitted.settled.device

    def works(setting: str, value: object) -> bool:
        changed = fit_with(config, model, device, setting, value)
        return changed is not None and changed.memory.prefix_tokens > 0

    limits, memory = fitted.limits, fitted.memory
    lower = {
        "max_num_seqs": (1, limits.max_num_seqs - 1),
        "max_model_len": (min_model_len(config), limits.max_model_len - 1),
        "expected_prefix_tokens": (1, (memory.expected_prefix_tokens or 1) - 1),
    }
    ways = []
    for setting, (low, high) in lower.items():
        value = largest(low, high, partial(works, setting))
        if value is not None:
            ways.append(f"{setting} of at most {value}")
    for fewer in remedy_fewer_drafts(config, works):
        ways.append("no speculation" if fewer.value is None else f"speculative of at most {fewer.value}")
    left_by_all_else = memory.available - memory.beside_cache
    size = smallest(memory.cache + 1, left_by_all_else, partial(works, "cache_memory"))
    if size is not None:
        ways.append(f"cache_memory of at least {size}")
    used = int(100 * memory.available / device.memory_bytes)
    percent = smallest(used + 1, 100, lambda value: works("memory_utilization", value / 100))
    if percent is not None:
        ways.append(f"memory_utilization of at least {percent / 100}")
    return ways
