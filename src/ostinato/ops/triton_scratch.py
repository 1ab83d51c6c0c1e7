"""The memory that Triton kernels allocate while they run, beside arguments and results, in bytes by plain numbers.

All of it is freed when the call returns. It is counted as the most that a launch table may choose.
"""

from __future__ import annotations

from ostinato.ops.sizes import SAMPLE_BLOCK

FLOAT = 4
"""Bytes."""

MOST_SEGMENTS = 16
"""Into so many parts attention cuts the keys of a row that decodes."""


def attention(*, tokens: int, num_heads: int, head_dim: int) -> int:
    """Of `tokens` tokens of rows that decode: a sum, a maximum and a total weight of each segment."""
    return tokens * num_heads * MOST_SEGMENTS * (head_dim + 2) * FLOAT


def linear(*, tokens: int, outputs: int, element_bytes: int) -> int:
    """A product before it is scaled, activated and added."""
    return tokens * outputs * element_bytes


def moe(*, tokens: int, size: int, inner: int, num_experts: int, experts_per_token: int, element_bytes: int) -> int:
    """The choices in order of their experts, and what each expert gives between its products and behind them."""
    choices = tokens * experts_per_token
    scores = tokens * num_experts * FLOAT
    return (choices + num_experts + 1) * FLOAT + choices * (size + inner) * element_bytes + scores


def ssd_scan(*, tokens: int, rows: int, chunk_size: int, num_heads: int, num_groups: int, state_elements: int) -> int:
    """Of every chunk of every row, cut where chunks end: a state before and one added, the sums of its decays, and
    scores of each group; all in float32."""
    chunks = tokens // chunk_size + 2 * rows
    return chunks * (2 * state_elements + chunk_size * (2 * num_heads + num_groups * chunk_size)) * FLOAT


def sample(*, positions: int, vocab_size: int) -> int:
    """The best logit of each block and its place, and a few numbers of each row."""
    return positions * (2 * -(-vocab_size // SAMPLE_BLOCK) + 16) * 2 * FLOAT
