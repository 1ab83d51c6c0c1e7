"""The memory that Triton kernels allocate while they run, beside arguments and results, in bytes by plain numbers.

All of it is freed when the call returns. It is counted as the most that a launch table may choose.
"""

from __future__ import annotations

from ostinato.ops.launches.attention import MAX_SEGMENTS, PROGRAMS
from ostinato.ops.launches.sample import num_blocks
from ostinato.ops.launches.state import DELTA_TOKENS

FLOAT = 4
"""Bytes."""


def attention(*, tokens: int, rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Of `tokens` tokens in `rows` rows that decode: a sum, a maximum and a total weight of each segment."""
    of_row = -(-tokens // max(rows, 1)) * num_heads // num_kv_heads
    segments = min(tokens * num_heads * MAX_SEGMENTS, of_row * PROGRAMS)
    return segments * (head_dim + 2) * FLOAT


def delta_scan(*, tokens: int, rows: int, num_heads: int, key_dim: int, value_dim: int, per_channel: bool) -> int:
    """What the pass along rows takes of each token and head: keys twice, its query, its value and its scores; and a
    decay of each chunk, or one per key channel."""
    chunks = tokens // DELTA_TOKENS + 2 * rows
    of_token = 3 * key_dim + value_dim + DELTA_TOKENS
    return num_heads * (tokens * of_token + chunks * (key_dim if per_channel else 1)) * FLOAT


def linear(*, tokens: int, outputs: int, element_bytes: int, in_size: int = 0, in_order: bool = False) -> int:
    """A product before it is scaled, activated and added; and its inputs, where they are put in their weights' order
    first."""
    return tokens * (outputs + (in_size if in_order else 0)) * element_bytes


def moe(*, tokens: int, size: int, inner: int, num_experts: int, experts_per_token: int, element_bytes: int) -> int:
    """The choices in order of their experts, and what each expert gives between its products and behind them."""
    choices = tokens * experts_per_token
    scores = tokens * num_experts * FLOAT
    return (choices + num_experts + 1) * FLOAT + choices * (size + inner) * element_bytes + scores


def sample(*, positions: int, vocab_size: int) -> int:
    """The best logit of each block and its place, and a few numbers of each row."""
    return positions * (2 * num_blocks(vocab_size) + 16) * FLOAT
