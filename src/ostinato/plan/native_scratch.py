"""The scratch of native kernels: memory that they keep from call to call, as much as the greediest of them needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ostinato.plan.model import LayerSpec

IN_CACHE = 512 * 1024
"""bytes of tokens that a matrix product takes at a time, in part; and the least number of them"""
LEAST_IN_CACHE = 24

COPIED_TOKENS = 512
"""that a product of many tokens copies at a time"""

SUMS = 32
"""floats that a product keeps per token: of two panels"""

TILE = 128
"""keys that attention takes at a time"""
UNIT_ROWS = 256
"""queries that it takes at a time, a vision encoder's too"""
CUT_ROWS = 32
"""of a unit whose keys several threads share, at the most: each keeps their sums for each tile"""

SCAN_HEADS = 4
"""heads that a thread scans at a time"""

VECTOR = 16
"""floats; sizes are padded to them"""

SAMPLED = 256
"""logits with a maximum of their own"""


def native_scratch(
    layers: Iterable[LayerSpec],
    head: tuple[int, int],
    native: Collection[str],
    tokens: int,
    positions: int,
    max_model_len: int,
    threads: int,
) -> int:
    """Bytes that the kernels of `native` keep, at the most: what all threads share, and what each has for itself.

    `head`: the sizes of the LM head, in and out; `positions` are sampled.
    """
    shared, own = [0], [0]
    for layer in layers:
        if "linear" in native:
            for linear in layer.linears:
                shared.append(_product(tokens, linear.in_size))
                own.append(min(tokens, _in_cache(linear.in_size)) * SUMS)
        if "moe" in native and layer.experts:
            of_all, of_each = _experts(layer, tokens)
            shared.append(of_all)
            own.append(of_each)
        if "attention" in native and layer.attention is not None:
            attention = layer.attention
            dim, rows = _padded(attention.head_dim), max(UNIT_ROWS, attention.num_heads // attention.num_kv_heads)
            shared.append(threads * (max_model_len // TILE + 1) * CUT_ROWS * (dim + 2))
            own.append(rows * (3 * dim + TILE + 4) + 2 * TILE * dim)
        if "ssd_scan" in native and layer.mamba2 is not None:
            mamba2 = layer.mamba2
            chunk, dim, state = (_padded(size) for size in (mamba2.chunk_size, mamba2.head_dim, mamba2.state_size))
            own.append((SCAN_HEADS + 1) * state * dim + chunk * (2 * state + 3 * chunk + 3 * dim + 4))
    if "linear" in native:
        shared.append(_product(positions, head[0]))
    if "sample" in native:
        shared.append(positions * -(-head[1] // SAMPLED))
        own.append(3 * head[1])
    return 4 * (max(shared) + threads * max(own))


def encoder_attention_scratch(head_dim: int) -> int:
    """Bytes that each thread keeps: its queries with their scores and sums, and a tile of keys and values."""
    dim = _padded(head_dim)
    return 4 * (UNIT_ROWS * (3 * dim + TILE + 2) + 2 * TILE * dim)


def _product(tokens: int, in_size: int) -> int:
    """Floats of the tokens that are packed, or copied, for all threads at a time."""
    return min(tokens, max(_in_cache(in_size), COPIED_TOKENS)) * _padded(in_size)


def _experts(layer: LayerSpec, tokens: int) -> tuple[int, int]:
    """Floats of all threads: the tokens, once for every choice, what is between the two products, and the sums of each
    token (the router needs less); and of each thread: the order of all choices, and the sums of those that are
    multiplied at a time."""
    up, down = layer.experts
    size, inner, places = up.in_size, down.in_size, tokens * layer.experts_per_token
    apart = 3 * VECTOR * 2  # whole vectors, and an odd number of cache lines
    shared = tokens * (size + apart) + places * (size + inner + 2 * apart)
    own = min(places, max(_in_cache(size), _in_cache(inner))) * SUMS + places + layer.num_experts + 1
    scores = tokens * _padded(layer.num_experts)
    return max(shared, scores), own


def _in_cache(in_size: int) -> int:
    """Tokens, where an element of them may have as little as two bytes."""
    return max(IN_CACHE // (2 * in_size), LEAST_IN_CACHE)


def _padded(size: int) -> int:
    return -(-size // VECTOR) * VECTOR
