"""The promises of the prefix cache: the prompts that hit, and the checkpoints that applications can pin.

Decisions beyond its sizes are here too: settings without effect, and a cache that is too small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, Remedy
from ostinato.kv_cache.checkpoints import SLOT_FRACTION, PrefixCachePolicy, StateCacheMode, plan_checkpoints
from ostinato.kv_cache.store import MAX_ENTRIES_WITHOUT_BLOCKS
from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.fitting.fit import FitResult, fit_with
from ostinato.plan.limits import largest, min_model_len, smallest
from ostinato.plan.memory.split import sliding_window_spec
from ostinato.plan.remedies import remedy_fewer_drafts

DEFAULT_PINS = 256
"""Most pinned prefixes of a model without state layers, if the setting is open."""


@dataclass(frozen=True)
class HitLaw:
    """The law by which a prompt hits what one earlier prompt has left, as long as nothing was evicted.

    `min_shared` tokens in common are the fewest that hit, and `step` more of them make a longer hit; both are 0 if no
    prompt hits. `min_repeated` and `repeated_step` are for a prompt that leaves the earlier one in the same block as
    another prompt before it: with state layers, that one has left a checkpoint there.
    """

    mode: StateCacheMode
    block_size: int
    has_state: bool
    branches: bool
    state_block_size: int
    step_tokens: int
    """Tokens of a step, at whose end mode `align` takes checkpoints."""
    num_checkpoints: int
    """Slots that all checkpoints share; one prompt takes a quarter at most, and wider spaced ones beyond that."""
    longest_full: int
    """Length up to which a prompt gets a checkpoint at all multiples of `state_block_size`; beyond it, the spacing is
    doubled, and so on."""
    max_model_len: int
    min_shared: int
    step: int
    min_repeated: int
    repeated_step: int
    whole_prompts: bool = False
    """True if only the same prompt hits, since its tokens see each other in both directions."""

    def hit(self, shared: int, earlier: int, prompt: int, is_repeated: bool = False) -> int:
        """Return the cached tokens of a prompt of `prompt` tokens that shares `shared` with one of `earlier` tokens.

        Both are served alone, without output. `is_repeated`: another prompt has left the earlier one in the same block.
        """
        boundary = min(shared, earlier, prompt - 1) // self.block_size * self.block_size
        if self.min_shared == 0 or (self.whole_prompts and not shared == earlier == prompt):
            return 0
        if not self.has_state or (is_repeated and self.branches):
            return boundary
        return max((end for end in self.checkpoints(earlier) if end <= boundary), default=0)

    def checkpoints(self, num_tokens: int) -> list[int]:
        """Return the positions of the checkpoints that a prompt of `num_tokens` tokens leaves if it runs alone."""
        policy = PrefixCachePolicy(True, self.mode, self.state_block_size, self.branches)
        positions = plan_checkpoints(policy, self.block_size, num_tokens, 0, 0, self.num_checkpoints)
        ends: set[int] = set()
        start = 0
        while start < num_tokens:
            end = positions.chunk_end(start, min(start + self.step_tokens, num_tokens))
            ends.update(positions.claim_inside(start, end))
            is_multiple = positions.max_interior > 0 and end % positions.spacing == 0
            if end % self.block_size == 0 and (end in (positions.last, num_tokens) or is_multiple):
                ends.add(end)
            start = end
        return sorted(ends)

    def __str__(self) -> str:
        if self.min_shared == 0:
            return "no prompt hits"
        if self.whole_prompts:
            return f"the same prompt hits, up to its last multiple of {self.block_size} tokens; no other does"
        text = f"prompts that share at least {self.min_shared} tokens hit; then every {self.step}"
        if self.mode == "align":
            text += f", of which each step of {self.step_tokens} tokens leaves the last"
        if self.has_state and self.longest_full < self.max_model_len:
            text += f" of a prompt of at most {self.longest_full} tokens, and wider spaced in longer ones"
        if self.has_state:
            text += f"; so do those that continue a whole prompt, from its last multiple of {self.block_size}"
        if (self.min_repeated, self.repeated_step) != (self.min_shared, self.step):
            text += (
                f"; the second that leaves an earlier prompt at the same place hits from {self.min_repeated} tokens "
                f"on, then every {self.repeated_step}"
            )
        return text


@dataclass(frozen=True)
class PinLimits:
    """Limits of what applications pin by marks (`cache_control`, `cache_breakpoints`, `checkpoints`).

    A mark costs `bytes_per_pin` for what is kept at one position, and the blocks up to there. All clients together pin
    `max_pins` checkpoints with `max_blocks` blocks, each for `max_ttl` seconds from its last use on; the clients have
    equal shares.
    """

    max_pins: int
    max_blocks: int
    max_ttl: int
    bytes_per_pin: int


def hit_law(config: EngineConfig, fitted: FitResult) -> HitLaw:
    """Return the hit law of a configuration."""
    settled, memory = fitted.settled, fitted.memory
    block, spacing, mode = config.block_size, settled.state_block_size, settled.state_cache_mode
    has_state, branches = settled.model.keeps_state, config.checkpoint_policy == "boundaries+branches"
    hits = config.enable_prefix_caching and not (has_state and mode == "none")
    first = (spacing if has_state else block) if hits else 0
    num_checkpoints = max(0, memory.num_slots + memory.num_packed - 1) if has_state else 0
    repeated = block if hits and (branches or not has_state) else first
    return HitLaw(
        mode=mode,
        block_size=block,
        has_state=has_state,
        branches=branches,
        state_block_size=spacing,
        step_tokens=fitted.limits.max_num_batched_tokens,
        num_checkpoints=num_checkpoints,
        # One of the share is for the end of the prompt.
        longest_full=max(1, num_checkpoints // SLOT_FRACTION) * spacing if has_state else 0,
        max_model_len=fitted.limits.max_model_len,
        min_shared=first,
        step=first,
        min_repeated=repeated,
        repeated_step=repeated,
        whole_prompts=settled.model.is_prefix_lm,
    )


def pin_limits(config: EngineConfig, fitted: FitResult) -> PinLimits:
    """Return how much applications can pin: half of what is beyond the working memory, unless less was asked for.

    ConfigError if more was asked for than there is.
    """
    memory, limits = fitted.memory, fitted.limits
    if hit_law(config, fitted).min_shared == 0:
        return PinLimits(0, 0, config.max_checkpoint_ttl, 0)
    blocks = MAX_ENTRIES_WITHOUT_BLOCKS
    if memory.kv_block:
        blocks = max(0, memory.num_blocks - 1 - -(-limits.max_model_len // config.block_size))
    most = memory.num_checkpoints if memory.state_slot else blocks
    rules = sliding_window_spec(memory, config.block_size, limits.max_num_batched_tokens)
    if rules is not None and rules.blocks_per_window:
        working = rules.blocks_needed(-(-limits.max_model_len // config.block_size))
        most = min(most, max(0, memory.num_window_blocks - 1 - working) // rules.blocks_per_window)
    asked = config.max_pinned_checkpoints
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_pinned_checkpoints {asked} is more than the {most} that the cache has room for beside running "
            "requests; ask for fewer, or give more cache_memory",
            [Remedy("max_pinned_checkpoints", most)],
        )
    own = memory.state_slot + (0 if rules is None else rules.blocks_per_window * memory.window_block)
    default = most // 2 if memory.state_slot else min(DEFAULT_PINS, most // 2)
    return PinLimits(default if asked is None else asked, blocks // 2, config.max_checkpoint_ttl, own)


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
