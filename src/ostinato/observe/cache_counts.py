"""Counts of cached memory: blocks, checkpoints, cache files and encoded images."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounts:
    """Events of the block and slot pools since the start."""

    checkpoints_taken: int = 0
    checkpoints_not_taken: int = 0
    """Checkpoints not taken because no slot was free or evictable, or lost at once to their own request."""
    evicted_blocks: int = 0
    evicted_checkpoints: int = 0
    evicted_panes: int = 0
    shared_blocks: int = 0
    """Computed blocks that were replaced by an equal block in the index."""


@dataclass(slots=True)
class FileCounts:
    """Events of the cache's files since the start."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    dropped: int = 0
    """Files not written, because too many writes were pending or a write had failed shortly before."""
    failed: int = 0
    """Writes that failed."""
    damaged: int = 0
    removed: int = 0
    """Files removed to stay within `cache_offload`."""


@dataclass(slots=True)
class EncoderCacheCounts:
    """Sums over the images that requests took from the encoder cache.

    An image is a hit if its cells exist, or if the same step writes them for another request; else it is a miss and is
    encoded. An image that a preempted request takes again counts again.
    """

    hits: int = 0
    hit_tokens: int = 0
    misses: int = 0
    encoded_tokens: int = 0
    evicted_items: int = 0
    evicted_tokens: int = 0
