"""What is counted of cached memory: blocks and checkpoints, files, and images that were encoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounts:
    """What happened to cached memory since the start."""

    checkpoints_taken: int = 0
    checkpoints_not_taken: int = 0
    """For want of a slot that was free or evictable; those lost again at once to their own request included."""
    evicted_blocks: int = 0
    evicted_checkpoints: int = 0
    evicted_panes: int = 0
    shared_blocks: int = 0
    """Computed blocks that were given up for an equal one in the index."""


@dataclass(slots=True)
class FileCounts:
    """What happened to the cache's files since the start."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    dropped: int = 0
    """Not written, since too much waited to be written already, or a write had failed shortly before."""
    failed: int = 0
    """Writes that failed."""
    damaged: int = 0
    removed: int = 0
    """To keep within cache_offload."""


@dataclass(slots=True)
class EncoderCacheCounts:
    """Sums over images. One that a request takes is a hit if its cells are there, or are to be written in the same step
    for another request, and else a miss, which is encoded. One that a preempted request takes again counts again."""

    hits: int = 0
    hit_tokens: int = 0
    misses: int = 0
    encoded_tokens: int = 0
    evicted_items: int = 0
    evicted_tokens: int = 0
