"""Memory that Triton kernels allocate while they run, besides arguments and results, in bytes by plain numbers.

All of it is freed when the call returns. It is counted as the most that a launch table may choose.
"""

from __future__ import annotations

from ostinato.ops.launches.attention import MAX_SEGMENTS, PROGRAMS
from ostinato.ops.launches.sample import num_blocks
from ostinato.ops.launches.state import DELTA_TOKENS

FLOAT_BYTES = 4
"""Bytes of a float."""


def triton_attention(*, tokens: int, rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the bytes for `tokens` tokens in `rows` decode rows.

    Each segment has a sum, a maximum and a total weight.
    """
    of_row = -(-tokens // max(rows, 1)) * num_heads // num_kv_heads
    segments = min(tokens * num_heads * MAX_SEGMENTS, of_row * PROGRAMS)
    return segments * (head_dim + 2) * FLOAT_BYTES


def triton_delta_scan(*, tokens: int, rows: int, num_heads: int, key_dim: int, value_dim: int, per_channel: bool) -> int:
    """Return the bytes that the pass along rows reads of each token and head, and a decay of each chunk.

    A token and head have two copies of the key, the query, the value and the scores. With `per_channel` a chunk has a
    decay per key channel.
    """
    chunks = tokens // DELTA_TOKENS + 2 * rows
    of_token = 3 * key_dim + value_dim + DELTA_TOKENS
    return num_heads * (tokens * of_token + chunks * (key_dim if per_channel else 1)) * FLOAT_BYTES


def triton_linear(*, tokens: int, outputs: int, element_bytes: int, in_size: int = 0, in_order: bool = False) -> int:
    """Return the bytes of a matmul's result before scale, activation and addition.

    With `has_act_order` the inputs count too: they are copied into the order of their weights first.
    """
    return tokens * (outputs + (in_size if in_order else 0)) * element_bytes


def triton_moe(*, tokens: int, size: int, inner: int, num_experts: int, experts_per_token: int, element_bytes: int) -> int:
    """Return the bytes of the choices in order of experts, and of each expert's values between and after matmuls."""
    choices = tokens * experts_per_token
    scores = tokens * num_experts * FLOAT_BYTES
    return (choices + num_experts + 1) * FLOAT_BYTES + choices * (size + inner) * element_bytes + scores


def triton_sample(*, positions: int, vocab_size: int) -> int:
    """Return the bytes of each block's best logit and its index, and a few numbers of each row."""
    return positions * (2 * num_blocks(vocab_size) + 16) * FLOAT_BYTES
