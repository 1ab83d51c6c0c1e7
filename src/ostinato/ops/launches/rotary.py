"""Launches of the operations on positions: rotation, angles, sums of learned vectors."""

from __future__ import annotations

from ostinato.ops.launches.table import Launch, power_of_two

ANGLES_BLOCK = 1024
"""Elements of a program."""


def rotary_launches(*, num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch that rotates `rotated` elements of each head; the others pass through."""
    blocks = {**_heads(max(num_heads, num_kv_heads), head_dim, rotated), "WIDTH": power_of_two(head_dim)}
    return (Launch("rotate_and_store", blocks),)


def rotate_launches(*, num_heads: int, head_dim: int, rotated: int, capability: int) -> tuple[Launch, ...]:
    return (Launch("rotate_tokens", _heads(num_heads, head_dim, rotated)),)


def rotary_angles_launches(*, capability: int) -> tuple[Launch, ...]:
    """Return the launch of `axial_angles` and `rotary_angles`, with few elements since float64 takes registers."""
    return (Launch("write_angles", {"BLOCK": 256}),)


def weighted_embedding_launches(*, count: int, capability: int) -> tuple[Launch, ...]:
    """Return the launch for sums of `count` vectors each."""
    return (Launch("add_vectors", {"COUNT": count, "BLOCK": ANGLES_BLOCK}),)


def _heads(num_heads: int, head_dim: int, rotated: int) -> dict[str, int]:
    half = rotated // 2
    return {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HALF_WIDTH": power_of_two(half),
        "REST_WIDTH": power_of_two(head_dim - rotated),
        "HEADS": power_of_two(num_heads, most=power_of_two(max(ANGLES_BLOCK // head_dim, 1))),
    }
