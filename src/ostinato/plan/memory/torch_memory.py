"""GPU memory that torch takes in addition to its tensors."""

from __future__ import annotations

from ostinato.units import KiB, MiB

SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB
"""Sizes of the segments that torch's caching allocator takes for tensors of up to 1 MiB, and of 1 to 10 MiB.

Each pool has its own segments, and one of each kind may be nearly empty.
"""

WORKSPACE, HOPPER_WORKSPACE = 8320 * KiB, 32 * MiB
"""Workspace of cuBLAS per stream with matmuls: before compute capability 9.0, and from 9.0 on."""

LT_WORKSPACE = 4 * MiB
"""Workspace of cuBLASLt before 9.0; from 9.0 on it is as large as cuBLAS's."""


def pool_bytes(peak: int) -> int:
    """Return the bytes of a memory pool for tensors that take `peak` bytes at once.

    It adds a quarter for fragmentation, and a segment of each kind.
    """
    return peak + peak // 4 + SMALL_SEGMENT + LARGE_SEGMENT if peak else 0


def workspace_bytes(capability: int | None, streams: int) -> int:
    """Return the bytes of workspaces on `streams` streams: where steps run, and where graphs are captured."""
    if capability is not None and capability >= 90:
        return streams * 2 * HOPPER_WORKSPACE
    return streams * (WORKSPACE + LT_WORKSPACE)
