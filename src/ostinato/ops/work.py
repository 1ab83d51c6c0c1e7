"""The work of kernels in a step: the bytes that each must move, and its operations, as functions of plain numbers.

Bytes are the least that must pass between memory and processor: weights once, states from read slots and to write
slots, keys and values. What a step computes on its way counts for nothing: in decoding it stays in the caches. A
multiplication and an addition count as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepShape:
    """`rows` rows of `tokens_per_row` tokens, each with `context` tokens before it; `decodes`: whether they are decode
    rows."""

    rows: int
    tokens_per_row: int
    context: int
    decodes: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def pairs(self) -> float:
        """Of a token and one that it attends to: an earlier one of its row or itself."""
        return self.pairs_within(None)

    def pairs_within(self, window: int | None) -> float:
        """The same where a token attends to the last `window` positions alone, of which its own is one."""
        count, seen = self.tokens_per_row, self.context
        if window is None:
            return self.rows * (count * seen + count * (count + 1) / 2)
        # So many tokens see all that is before them.
        growing = max(0, min(count, window - seen))
        return self.rows * (growing * seen + growing * (growing + 1) / 2 + (count - growing) * window)

    @property
    def states_moved(self) -> int:
        """States read and written, of one layer. A row without a context reads none: it begins with zeros."""
        return self.rows * ((1 if self.context else 0) + (self.tokens_per_row if self.decodes else 1))


@dataclass(frozen=True)
class KernelWork:
    """Bytes and floating-point operations, as this file counts them."""

    num_bytes: float = 0
    flops: float = 0

    def __add__(self, other: KernelWork) -> KernelWork:
        return KernelWork(self.num_bytes + other.num_bytes, self.flops + other.flops)


def products(step: StepShape, *, parameters: float, num_bytes: float) -> KernelWork:
    """Every token meets `parameters` weights, which take `num_bytes`."""
    return KernelWork(num_bytes, 2 * parameters * step.tokens)


def attention(
    step: StepShape,
    *,
    num_heads: int,
    head_dim: int,
    kv_bytes_per_token: int,
    window: int | None = None,
) -> KernelWork:
    """All keys and values of a row that are in the `window` of one of its tokens are read, the new ones written
    before; a token's take `kv_bytes_per_token`."""
    before = step.context if window is None else min(step.context, window - 1)
    keys = step.rows * (before + 2 * step.tokens_per_row)
    flops = pair_flops(num_heads, head_dim) * step.pairs_within(window)
    return KernelWork(keys * kv_bytes_per_token, flops)


def causal_conv1d(step: StepShape, *, channels: int, width: int, element_bytes: int) -> KernelWork:
    """A state holds the inputs of all taps but the last."""
    elements = step.states_moved * (width - 1) * channels + width * channels
    return KernelWork(elements * element_bytes, 2 * width * channels * step.tokens)


def recurrence(step: StepShape, *, state_elements: int, element_bytes: int, num_heads: int) -> KernelWork:
    """Each token is added to the state and reads it; a scan by chunks does no less. Each head has three numbers of its
    own, in float32."""
    num_bytes = step.states_moved * state_elements * element_bytes + 3 * num_heads * 4
    return KernelWork(num_bytes, 4 * state_elements * step.tokens)


def delta_rule(step: StepShape, *, state_elements: int, element_bytes: int, num_heads: int) -> KernelWork:
    """As `recurrence`. A token decays the state, reads it at its key and at its query, and is added to it: seven
    operations for each element. Each head has two numbers of its own, in float32."""
    num_bytes = step.states_moved * state_elements * element_bytes + 2 * num_heads * 4
    return KernelWork(num_bytes, delta_flops(state_elements=state_elements) * step.tokens)


def delta_flops(*, state_elements: int) -> int:
    """Per token, of the delta rule."""
    return 7 * state_elements


def selective_recurrence(step: StepShape, *, channels: int, state_size: int, element_bytes: int) -> KernelWork:
    """As `recurrence`, with a decay for each element of the state. The rates, and two numbers of each channel, are in
    float32."""
    elements = channels * state_size
    num_bytes = step.states_moved * elements * element_bytes + (elements + 2 * channels) * 4
    return KernelWork(num_bytes, selective_flops(state_elements=elements) * step.tokens)


def selective_flops(*, state_elements: int) -> int:
    """Per token, of the recurrence of Mamba-1: each element is multiplied by its decay, is added to and is read; the
    decay is a product and an exponential, which counts as one operation."""
    return 6 * state_elements


def pair_flops(num_heads: int, head_dim: int) -> int:
    """A product and a sum over each head, for the score and again for the value."""
    return 4 * num_heads * head_dim


def chunked_scan_flops(*, state_elements: int, state_size: int, groups: int, channels: int, chunk_size: int) -> int:
    """Per token, of the recurrence in its chunked form (Dao and Gu 2024, arXiv 2405.21060, section 6).

    Each token is added to the state and reads it, and attends, in scores of one group and values of one head each, to
    itself and those before it in its chunk: (chunk_size + 1) / 2 of them on average.
    """
    return 2 * 2 * state_elements + (chunk_size + 1) * (groups * state_size + channels)
