"""Window blocks for layers with sliding-window attention, and the plan's decisions about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.cache.pane_rules import SlidingWindowSpec
from ostinato.plan.decision import Decision
from ostinato.plan.memory.keys_and_values import bytes_per_token
from ostinato.plan.model import ModelSpec
from ostinato.units import format_bytes

if TYPE_CHECKING:
    from ostinato.plan.memory.cache_split import MemoryPlan


def longest_window(model: ModelSpec, max_model_len: int) -> int:
    """Return the longest attention window, which decides when window blocks of all layers with a window are freed.

    0 if there is none, or if no request can be longer: then all layers are in blocks.
    """
    longest = max((layer.window for layer in model.attention_layers if layer.window is not None), default=0)
    return longest if longest < max_model_len else 0


def sliding_window_spec(memory: MemoryPlan, block_size: int, step_tokens: int) -> SlidingWindowSpec | None:
    """Return a plan's rules for window blocks, or None without them. `step_tokens` is its `max_num_batched_tokens`."""
    return SlidingWindowSpec(memory.sliding_window, block_size, step_tokens) if memory.sliding_window else None


def window_block_bytes(model: ModelSpec, block_size: int, dtype: str) -> int:
    """Return the bytes of one window block: keys and values of `block_size` tokens in all layers with a window."""
    return block_size * sum(bytes_per_token(each, dtype) for each in model.attention_layers if each.window is not None)


def window_decisions(
    model: ModelSpec, memory: MemoryPlan, max_model_len: int, block_size: int, step_tokens: int
) -> list[Decision]:
    """Return the decision that says what window blocks save for the longest request, and how many such requests fit."""
    rules = sliding_window_spec(memory, block_size, step_tokens)
    if rules is None:
        return []
    layers = model.attention_layers
    sizes = sorted({layer.window for layer in layers if layer.window is not None})
    count = sum(layer.window is not None for layer in layers)
    blocks = -(-max_model_len // block_size)
    own = min(blocks, rules.blocks_per_request)
    needed = blocks * memory.kv_block + own * memory.window_block
    fitting = [(memory.num_window_blocks - 1 - min(rules.shared_blocks, blocks - own)) // own]
    fitting += [(memory.num_blocks - 1) // blocks] if memory.kv_block else []
    reason = (
        f"{count} of {len(layers)} attention layers read the last {' or '.join(map(str, sizes))} tokens alone, and a "
        f"request keeps no more than {own} panes of theirs between its steps; one of max_model_len tokens takes "
        f"{format_bytes(needed)} instead of {format_bytes(blocks * (memory.kv_block + memory.window_block))}, and "
        f"{min(fitting)} of that length fit at once"
    )
    return [Decision("sliding windows", None, "keys and values outside are let go of", reason)]
