"""Work of kernels in a step: the bytes that each must move, and its operations, as functions of plain numbers.

Bytes are the least that must pass between memory and processor: weights once, states from read slots and to write
slots, keys and values. Intermediate results of a step count for nothing: in decoding they stay in the caches. A
multiplication and an addition count as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepShape:
    """Step of `rows` rows (decode rows if it `decodes`) of `tokens_per_row` tokens, each after `context` tokens."""

    rows: int
    tokens_per_row: int
    context: int
    decodes: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def pairs(self) -> float:
        """Number of pairs of a token and a position that it attends to: an earlier token of its row or itself."""
        return self.pairs_within(None)

    def pairs_within(self, window: int | None) -> float:
        """Return the attended pairs if a token sees only the last `window` positions, its own included."""
        count, seen = self.tokens_per_row, self.context
        if window is None:
            return self.rows * (count * seen + count * (count + 1) / 2)
        # These tokens see all positions before them.
        growing = max(0, min(count, window - seen))
        return self.rows * (growing * seen + growing * (growing + 1) / 2 + (count - growing) * window)

    @property
    def states_moved(self) -> int:
        """Number of states of a layer that are read and written; a row without context begins with zeros."""
        return self.rows * ((1 if self.context else 0) + (self.tokens_per_row if self.decodes else 1))


@dataclass(frozen=True)
class KernelCost:
    """Number of bytes and floating-point operations, as this file counts them."""

    num_bytes: float = 0
    flops: float = 0

    def __add__(self, other: KernelCost) -> KernelCost:
        return KernelCost(self.num_bytes + other.num_bytes, self.flops + other.flops)


def matmul_cost(step: StepShape, *, parameters: float, num_bytes: float) -> KernelCost:
    """Return the work of multiplying every token with `parameters` weights, which take `num_bytes`."""
    return KernelCost(num_bytes, 2 * parameters * step.tokens)


def attention_cost(
    step: StepShape,
    *,
    num_heads: int,
    head_dim: int,
    kv_bytes_per_token: int,
    window: int | None = None,
) -> KernelCost:
    """Return the work of attention, where a token's keys and values take `kv_bytes_per_token`.

    It writes the new keys and values first, then reads all that are in the `window` of one of the row's tokens.
    """
    before = step.context if window is None else min(step.context, window - 1)
    keys = step.rows * (before + 2 * step.tokens_per_row)
    flops = pair_flops(num_heads, head_dim) * step.pairs_within(window)
    return KernelCost(keys * kv_bytes_per_token, flops)


def select_blocks_cost(
    step: StepShape,
    *,
    index_heads: int,
    index_dim: int,
    index_ratio: int,
    index_budget: int,
    index_bytes_per_token: int,
) -> KernelCost:
    """Return the work of selecting blocks, where a token's entry in the indexer's cache takes `index_bytes_per_token`.

    It writes the new entries. Tokens that see more blocks than they select multiply their queries with the key of each
    block, and so all entries are read.
    """
    end, written = step.context + step.tokens_per_row, step.tokens
    selecting = max(0, min(step.tokens_per_row, end - index_budget - index_ratio + 1))
    pairs = step.rows * (selecting * end - selecting * (selecting - 1) / 2) / index_ratio
    num_read = step.rows * end if selecting else 0
    return KernelCost((written + num_read) * index_bytes_per_token, 2 * index_heads * index_dim * pairs)


def selected_attention_cost(
    step: StepShape,
    *,
    num_heads: int,
    head_dim: int,
    kv_bytes_per_token: int,
    index_bytes_per_token: int,
    index_budget: int,
) -> KernelCost:
    """Return the least work of attention to selected blocks, which have `index_budget` positions.

    What one token of a row selects is read; others may select the same. The entry of an indexer, of
    `index_bytes_per_token`, is a part of `kv_bytes_per_token` that it does not read.
    """
    own = kv_bytes_per_token - index_bytes_per_token
    return attention_cost(step, num_heads=num_heads, head_dim=head_dim, kv_bytes_per_token=own, window=index_budget)


def indexed_attention_cost(
    step: StepShape,
    *,
    num_heads: int,
    head_dim: int,
    kv_bytes_per_token: int,
    index_heads: int,
    index_dim: int,
    index_ratio: int,
    index_budget: int,
    index_bytes_per_token: int,
) -> KernelCost:
    """Return the work of both, selecting blocks and attention to them."""
    return select_blocks_cost(
        step,
        index_heads=index_heads,
        index_dim=index_dim,
        index_ratio=index_ratio,
        index_budget=index_budget,
        index_bytes_per_token=index_bytes_per_token,
    ) + selected_attention_cost(
        step,
        num_heads=num_heads,
        head_dim=head_dim,
        kv_bytes_per_token=kv_bytes_per_token,
        index_bytes_per_token=index_bytes_per_token,
        index_budget=index_budget,
    )


def causal_conv1d_cost(step: StepShape, *, channels: int, width: int, element_bytes: int) -> KernelCost:
    """Return the work of the convolution, whose state keeps the inputs of all taps but the last."""
    elements = step.states_moved * (width - 1) * channels + width * channels
    return KernelCost(elements * element_bytes, 2 * width * channels * step.tokens)


def dilated_conv1d_cost(
    step: StepShape, *, stream_channels: int, stream_width: int, dilation: int, element_bytes: int
) -> KernelCost:
    """Return the work of a convolution with gaps, whose state keeps all inputs between its taps."""
    elements = step.states_moved * (stream_width - 1) * dilation * stream_channels + stream_width * stream_channels
    return KernelCost(elements * element_bytes, 2 * stream_width * stream_channels * step.tokens)


def ngram_ids_cost(step: StepShape, *, token_elements: int, ngram_heads: int, element_bytes: int) -> KernelCost:
    """Return the work of hashing n-grams: the tokens that a state keeps, and a few operations for each head."""
    return KernelCost(step.states_moved * token_elements * element_bytes, 4 * ngram_heads * step.tokens)


def recurrence_cost(step: StepShape, *, state_elements: int, element_bytes: int, num_heads: int) -> KernelCost:
    """Return the work of adding each token to the state and reading it; a scan by chunks does no less.

    Each head has three numbers in float32 besides its state.
    """
    num_bytes = step.states_moved * state_elements * element_bytes + 3 * num_heads * 4
    return KernelCost(num_bytes, 4 * state_elements * step.tokens)


def delta_rule_cost(step: StepShape, *, state_elements: int, element_bytes: int, num_heads: int) -> KernelCost:
    """Return the work of the delta rule, counted like `recurrence_cost`.

    A token decays the state, reads it at its key and at its query, and is added to it: seven operations for each
    element. Each head has two numbers in float32 besides its state.
    """
    num_bytes = step.states_moved * state_elements * element_bytes + 2 * num_heads * 4
    return KernelCost(num_bytes, delta_flops(state_elements=state_elements) * step.tokens)


def delta_flops(*, state_elements: int) -> int:
    """Return the operations of the delta rule per token."""
    return 7 * state_elements


def selective_recurrence_cost(step: StepShape, *, channels: int, state_size: int, element_bytes: int) -> KernelCost:
    """Return the work of Mamba-1, counted like `recurrence_cost`, with a decay for each element of the state.

    The rates, and two numbers of each channel, are in float32.
    """
    elements = channels * state_size
    num_bytes = step.states_moved * elements * element_bytes + (elements + 2 * channels) * 4
    return KernelCost(num_bytes, selective_flops(state_elements=elements) * step.tokens)


def selective_flops(*, state_elements: int) -> int:
    """Return the operations of the Mamba-1 recurrence per token.

    Each element is multiplied by its decay, added to, and read. The decay is a product and an exponential, which counts
    as one operation.
    """
    return 6 * state_elements


def pair_flops(num_heads: int, head_dim: int) -> int:
    """Return the operations of one attended pair.

    They are a product and a sum over each head, for the score and again for the value.
    """
    return 4 * num_heads * head_dim


def chunked_scan_flops(*, state_elements: int, state_size: int, groups: int, channels: int, chunk_size: int) -> int:
    """Return the operations of the chunked recurrence per token (Dao and Gu 2024, arXiv 2405.21060, section 6).

    Each token is added to the state and reads it, and attends, in scores of one group and values of one head each, to
    itself and those before it in its chunk: (chunk_size + 1) / 2 of them on average.
    """
    return 2 * 2 * state_elements + (chunk_size + 1) * (groups * state_size + channels)
