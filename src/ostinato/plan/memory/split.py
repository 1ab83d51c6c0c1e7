"""Split of a device's memory among weights, activations, blocks, window blocks and slots.

Window blocks are for layers with sliding-window attention. The functions are pure and take plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.kv_cache.sliding_window import SlidingWindowSpec
from ostinato.ops.sizes import DTYPE_BYTES
from ostinato.plan.decision import Decision
from ostinato.plan.encoder.memory import EncoderMemory
from ostinato.plan.limits import largest
from ostinato.plan.memory.cache_modes import bytes_per_token
from ostinato.plan.mixers import StateDtype
from ostinato.plan.model import ModelSpec
from ostinato.units import format_bytes


@dataclass(frozen=True)
class BlockDemand:
    """Needs of requests.

    `block` and `window_block` are bytes of one block and one window block; `longest` and `expected` are the blocks of a
    request of max_model_len tokens and of a prefix of the expected length; `rows` are those of a step.
    """

    block: int
    window_block: int
    rules: SlidingWindowSpec
    rows: int
    longest: int
    expected: int

    @property
    def prefix_window_blocks(self) -> int:
        """Window blocks of a cached prefix."""
        return min(self.expected, self.rules.blocks_per_window)

    def window_block_share(self, num_blocks: int) -> float:
        """Return the share that window blocks have of the memory of a request of `num_blocks` blocks."""
        window_blocks = min(num_blocks, self.rules.blocks_per_request) * self.window_block
        return window_blocks / (window_blocks + num_blocks * self.block)


def split_tables(tables: BlockDemand, room: int, holds_prefixes: bool) -> tuple[int, int]:
    """Return (blocks, window blocks) that `room` bytes are split into, without the null ones.

    There is room for one request of max_model_len tokens. Long requests have few window blocks for their blocks, short
    ones many. How long they will be is not known: with x of the memory for window blocks, and s the share that requests
    of one length would best have there, x / s of as many such requests as there could be run at once if x < s, and (1 -
    x) / (1 - s) otherwise. The x that is equally far from the best for prefixes of the expected length and for the
    longest requests is s_short / (s_short + 1 - s_long). Without prefixes to hold there are no more window blocks than
    `rows` requests can use.
    """
    rules, block, window_block = tables.rules, tables.block, tables.window_block
    short, long = tables.window_block_share(tables.expected), tables.window_block_share(tables.longest)
    wanted = int(room * (short / (short + 1 - long))) // window_block
    most = wanted if holds_prefixes else rules.blocks_needed(tables.longest, tables.rows)
    window_blocks = max(
        rules.blocks_needed(tables.longest), min(wanted, most, (room - tables.longest * block) // window_block)
    )
    return ((room - window_blocks * window_block) // block, window_blocks) if block else (0, room // window_block)


def prefixes_in(tables: BlockDemand, blocks: int, window_blocks: int) -> int:
    """Return how many distinct prefixes fit in these blocks and window blocks in addition to running requests.

    Running requests have a prefix's length and fill all rows, but no more than half of each pool; one of max_model_len
    always fits.
    """
    rules, prefixes = tables.rules, []
    if tables.block:
        running = max(min(tables.rows * tables.expected, blocks // 2), tables.longest)
        prefixes.append((blocks - running) // tables.expected)
    if tables.prefix_window_blocks:
        used = max(
            min(rules.blocks_needed(tables.expected, tables.rows), window_blocks // 2),
            rules.blocks_needed(tables.longest),
        )
        prefixes.append((window_blocks - used) // tables.prefix_window_blocks)
    return max(0, min(prefixes, default=0))


DEFAULT_PREFIX_TOKENS = 1024
"""Default mean length of prefixes that the cache is split for: a system prompt with examples, or a few turns."""

MAX_CACHED_TOKENS = 2**22
"""Upper bound of the tokens of prefixes that are planned for.

Memory for more is better left to others, since every block and slot is also an id to keep.
"""

NO_ENCODER = EncoderMemory()


@dataclass(frozen=True)
class MemoryPlan:
    """The split. Sizes are in bytes, of one block and one slot for `kv_block` and `state_slot`.

    The counts include the null block and the null slot; a model without attention has no blocks, one without state no
    slots. `cache` is the size of all blocks and slots, `available` what the plan may use in all. `encoder_graphs` and
    `encoder_cache` are 0 for a model that takes text alone.

    `num_checkpoints` slots are planned beyond the null one and the working ones of `max_num_seqs` rows. In addition to
    `max_num_seqs` running requests of `expected_prefix_tokens` tokens each, the cache holds `prefix_tokens` tokens of
    distinct prefixes of that length; None and 0 if no prompt can hit.
    """

    weights: int
    activations: int
    graphs: int
    encoder_graphs: int
    encoder_cache: int
    kv_block: int
    state_slot: int
    num_blocks: int
    num_slots: int
    slots_per_request: int
    num_checkpoints: int
    expected_prefix_tokens: int | None
    prefix_tokens: int
    cache: int
    available: int
    mapped_weights: int = 0
    """The part of the weights that stays in the pages of the checkpoint's file."""
    window_block: int = 0
    """Bytes of a window block, the only place of a block's tokens of the layers with a window."""
    num_window_blocks: int = 0
    sliding_window: int = 0
    """The longest window of these layers. It and the two above are 0 without such layers."""
    packed_state: int = 0
    """Bytes of a packed checkpoint; 0 if checkpoints stay in slots."""
    num_packed: int = 0
    """Checkpoints that are packed, of the `num_checkpoints`; the others have a slot."""

    @property
    def beside_cache(self) -> int:
        """Bytes of everything except blocks, window blocks and slots."""
        return self.weights + self.activations + self.graphs + self.encoder_graphs + self.encoder_cache

    @property
    def used(self) -> int:
        return self.beside_cache + self.cache


@dataclass(frozen=True)
class MemoryBudget:
    """Inputs of a split that do not depend on the limits on rows and tokens. Sizes are in bytes.

    `cache_size` is the size that the cache should have: exactly if `cache_is_given`, else less if there is less room;
    None if it may take everything that is left. `holds_prefixes` is true if a prompt can hit, so that the cache is
    split for prefixes, of `expected_prefix_tokens` tokens if the user gave it.
    """

    available: int
    weights: int
    cache_size: int | None
    cache_is_given: bool
    block_size: int
    kv_block: int
    state_slot: int
    slots_per_request: int
    holds_prefixes: bool = False
    expected_prefix_tokens: int | None = None
    mapped_weights: int = 0
    """The part of the weights that is mapped from files."""
    window_block: int = 0
    window_block_window: int = 0
    packed_state: int = 0
    """Bytes of a packed checkpoint; 0 if checkpoints stay in slots."""

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint of a cached prefix."""
        return self.packed_state or self.state_slot

    def window_block_rules(self, step_tokens: int) -> SlidingWindowSpec | None:
        """Return the rules for window blocks in steps of up to `step_tokens` tokens; None without window blocks."""
        return (
            SlidingWindowSpec(self.window_block_window, self.block_size, step_tokens)
            if self.window_block_window
            else None
        )


def slots_per_request(num_speculative_tokens: int = 0) -> int:
    """Return the slots that a running request writes in one step: one for the state after each of its input tokens."""
    return 1 + num_speculative_tokens


def kv_block_bytes(model: ModelSpec, block_size: int, dtype: str) -> int:
    """Return the bytes of one block: keys and values of `block_size` tokens in all attention layers.

    A drafter's layers are included. `dtype` is that of the stored keys and values.
    """
    return block_size * sum(bytes_per_token(attention, dtype) for attention in model.storing_layers)


def state_slot_bytes(model: ModelSpec, dtype: str, ssm_state_dtype: str) -> int:
    """Return the bytes of one slot: the state of each state layer, and the hidden state that a drafter needs.

    The arrays are in the model's dtype or in `ssm_state_dtype`.
    """
    widths: dict[StateDtype, int] = {"model": DTYPE_BYTES[dtype], "state": DTYPE_BYTES[ssm_state_dtype]}
    return sum(state.num_bytes(widths) for state in model.states)


def cache_need(budget: MemoryBudget, max_num_seqs: int, max_model_len: int, step_tokens: int = 1) -> int:
    """Return the bytes of the smallest cache that a plan may have.

    It has the working slots of `max_num_seqs` rows, the blocks and window blocks of one request of `max_model_len`
    tokens in steps of up to `step_tokens`, and the null ones.
    """
    slots, blocks = _slots(budget, max_num_seqs), _blocks(budget, 1, max_model_len)
    window_blocks = window_blocks_of(budget, 1, max_model_len, step_tokens)
    return slots * budget.state_slot + blocks * budget.kv_block + window_blocks * budget.window_block


def window_blocks_of(budget: MemoryBudget, requests: int, max_model_len: int, step_tokens: int) -> int:
    """Return the window blocks of `requests` requests, with the null one; 0 if there are none."""
    rules = budget.window_block_rules(step_tokens)
    return 0 if rules is None else rules.blocks_needed(_blocks_of(max_model_len, budget.block_size), requests) + 1


def cache_bytes_left(budget: MemoryBudget, activations: int, others: int = 0) -> int:
    """Return the cache's bytes, negative if the rest does not fit; `others`: graphs and what the encoder keeps."""
    left = budget.available - budget.weights - others - activations
    if budget.cache_size is None:
        return left
    if budget.cache_is_given:
        return budget.cache_size if left >= budget.cache_size else -1
    return min(budget.cache_size, left)


def fit_memory(
    budget: MemoryBudget,
    activations: int,
    max_num_seqs: int,
    max_model_len: int,
    graphs: int = 0,
    encoder: EncoderMemory = NO_ENCODER,
    step_tokens: int = 1,
) -> MemoryPlan | None:
    """Return the split for these limits, or None if it does not fit.

    Working slots are counted for `max_num_seqs` rows. If prompts can hit, the rest is for running requests and prefixes
    (see `prefixes_that_fit`), up to `max_prefixes` of them; what is left over goes to blocks. There are no more blocks
    than all those prefixes and `max_num_seqs` requests of `max_model_len` tokens can use, except for a remainder that
    holds no further prefix. With window blocks, `split_tables` splits what slots leave; steps have up to `step_tokens`
    tokens.
    """
    room = cache_bytes_left(budget, activations, graphs + encoder.total)
    if cache_need(budget, max_num_seqs, max_model_len, step_tokens) > room:
        return None
    expected = expected_prefix(budget, max_model_len)
    most = max_prefixes(budget, expected) if budget.holds_prefixes else 0
    possible = prefixes_that_fit(budget, room, max_num_seqs, max_model_len, step_tokens)
    prefixes = min(possible, most)
    checkpoints = prefixes if budget.state_slot else 0
    num_packed = checkpoints if budget.packed_state else 0
    unpacked = _unpacked(budget, room, max_num_seqs, max_model_len, step_tokens) + checkpoints - num_packed
    num_slots = _slots(budget, max_num_seqs) + unpacked
    num_blocks = num_window_blocks = 0
    left = room - num_slots * budget.state_slot - num_packed * budget.packed_state
    tables = _tables(budget, max_num_seqs, max_model_len, step_tokens)
    if tables is not None:
        split = split_tables(tables, left - budget.kv_block - budget.window_block, budget.holds_prefixes)
        num_blocks, num_window_blocks = split[0] + bool(budget.kv_block), split[1] + 1
    elif budget.kv_block:
        num_blocks = left // budget.kv_block
    if possible > most or not budget.holds_prefixes:
        used = prefixes * _blocks_of(expected, budget.block_size)
        num_blocks = min(num_blocks, _blocks(budget, max_num_seqs, max_model_len) + used)
        if tables is not None:
            most_window_blocks = window_blocks_of(budget, max_num_seqs, max_model_len, step_tokens)
            num_window_blocks = min(num_window_blocks, most_window_blocks + prefixes * tables.prefix_window_blocks)
    return MemoryPlan(
        weights=budget.weights,
        activations=activations,
        graphs=graphs,
        encoder_graphs=encoder.graphs,
        encoder_cache=encoder.cache,
        kv_block=budget.kv_block,
        state_slot=budget.state_slot,
        num_blocks=num_blocks,
        num_slots=num_slots,
        slots_per_request=budget.slots_per_request,
        num_checkpoints=unpacked + num_packed,
        expected_prefix_tokens=expected if budget.holds_prefixes else None,
        prefix_tokens=prefixes * expected,
        mapped_weights=budget.mapped_weights,
        cache=num_blocks * budget.kv_block
        + num_window_blocks * budget.window_block
        + num_slots * budget.state_slot
        + num_packed * budget.packed_state,
        available=budget.available,
        window_block=budget.window_block,
        num_window_blocks=num_window_blocks,
        sliding_window=budget.window_block_window,
        packed_state=budget.packed_state,
        num_packed=num_packed,
    )


def expected_prefix(budget: MemoryBudget, max_model_len: int) -> int:
    """Return the tokens of the prefixes that the cache is split for."""
    return budget.expected_prefix_tokens or min(DEFAULT_PREFIX_TOKENS, max_model_len)


def prefixes_that_fit(
    budget: MemoryBudget, room: int, max_num_seqs: int, max_model_len: int, step_tokens: int = 1
) -> int:
    """Return how many distinct prefixes fit in `room` bytes, each with its blocks and one checkpoint.

    Running requests are subtracted first: the working slots of `max_num_seqs` rows, those of unpacked checkpoints, and
    the blocks of as many requests of a prefix's length. These are no more than half of the possible blocks, but always
    those of one request of `max_model_len`. With window blocks, see `prefixes_in`.
    """
    tables = _tables(budget, max_num_seqs, max_model_len, step_tokens)
    unpacked = _unpacked(budget, room, max_num_seqs, max_model_len, step_tokens)
    room -= (_slots(budget, max_num_seqs) + unpacked) * budget.state_slot
    if tables is not None:
        return _prefixes_with_window_blocks(budget, tables, room)
    blocks = _blocks_of(expected_prefix(budget, max_model_len), budget.block_size)
    each = blocks * budget.kv_block + budget.checkpoint
    rest = room - budget.kv_block
    if budget.kv_block:
        running = min(max_num_seqs * blocks, rest // budget.kv_block // 2)
        rest -= max(running, _blocks_of(max_model_len, budget.block_size)) * budget.kv_block
    return rest // each if each else 0


def max_prefixes(budget: MemoryBudget, expected: int) -> int:
    """Return the largest number of prefixes of `expected` tokens that is planned for."""
    return max(1, MAX_CACHED_TOKENS // (_blocks_of(expected, budget.block_size) * budget.block_size))


def _tables(budget: MemoryBudget, rows: int, max_model_len: int, step_tokens: int) -> BlockDemand | None:
    rules = budget.window_block_rules(step_tokens)
    if rules is None:
        return None
    expected = _blocks_of(expected_prefix(budget, max_model_len), budget.block_size)
    longest = _blocks_of(max_model_len, budget.block_size)
    return BlockDemand(budget.kv_block, budget.window_block, rules, rows, longest, expected)


def _prefixes_with_window_blocks(budget: MemoryBudget, tables: BlockDemand, room: int) -> int:
    """Return the prefixes that fit in `room` bytes for blocks, window blocks and checkpoints."""

    def beside(prefixes: int) -> int:
        left = room - budget.kv_block - budget.window_block - prefixes * budget.checkpoint
        least = tables.longest * budget.kv_block + tables.rules.blocks_needed(tables.longest) * budget.window_block
        return prefixes_in(tables, *split_tables(tables, left, budget.holds_prefixes)) if left >= least else -1

    if not budget.checkpoint:
        return beside(0)
    return largest(1, max(1, room // budget.checkpoint), lambda prefixes: beside(prefixes) >= prefixes) or 0


def _slots(budget: MemoryBudget, rows: int) -> int:
    return rows * budget.slots_per_request + 1 if budget.state_slot else 0


CHUNK_CHECKPOINTS = 4
"""Slots for the checkpoints that a chunk of a prompt writes, before they are packed."""


def _unpacked(budget: MemoryBudget, room: int, rows: int, max_model_len: int, step_tokens: int) -> int:
    """Return the slots of checkpoints that are not packed yet: one per row, and those of a chunk.

    They take no more than half of what working slots and one request of `max_model_len` leave of `room`.
    """
    if not budget.packed_state or not budget.holds_prefixes:
        return 0
    left = room - cache_need(budget, rows, max_model_len, step_tokens)
    return max(0, min(rows + CHUNK_CHECKPOINTS, left // 2 // budget.state_slot))


def _blocks(budget: MemoryBudget, requests: int, max_model_len: int) -> int:
    return requests * _blocks_of(max_model_len, budget.block_size) + 1 if budget.kv_block else 0


def _blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


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
    return block_size * sum(bytes_per_token(layer, dtype) for layer in model.storing_layers if layer.window is not None)


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
        f"request keeps no more than {own} window blocks of theirs between its steps; one of max_model_len tokens "
        f"takes {format_bytes(needed)} instead of {format_bytes(blocks * (memory.kv_block + memory.window_block))}, "
        f"and {min(fitting)} of that length fit at once"
    )
    return [Decision("sliding windows", None, "keys and values outside are freed", reason)]
