"""What torch takes of a GPU's memory beside what its tensors need."""

from __future__ import annotations

from ostinato.units import KiB, MiB

SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB
"""In such pieces torch's caching allocator takes memory for tensors of up to 1 MiB, and of 1 to 10 MiB. Each pool has
pieces of its own, of which one of each kind may be nearly empty."""

WORKSPACE, HOPPER_WORKSPACE = 8320 * KiB, 32 * MiB
"""Of cuBLAS, for each stream that has products: before compute capability 9.0, and from there on."""

LT_WORKSPACE = 4 * MiB
"""Of cuBLASLt, before 9.0; from there on as much as cuBLAS's."""


def pool_bytes(peak: int) -> int:
    """Bytes of a memory pool for tensors that take `peak` bytes at once: a quarter more, for what fits into no gap that
    is free, and a piece of each kind."""
    return peak + peak // 4 + SMALL_SEGMENT + LARGE_SEGMENT if peak else 0


def workspace_bytes(capability: int | None, streams: int) -> int:
    """Bytes that products keep on so many streams: where steps run, and where graphs are captured."""
    if capability is not None and capability >= 90:
        return streams * 2 * HOPPER_WORKSPACE
    return streams * (WORKSPACE + LT_WORKSPACE)
