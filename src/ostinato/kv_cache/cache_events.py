"""Cache events: what enters and leaves a prefix index, for routers outside the server.

Names and fields are those of vLLM's events, with checkpoints as a further kind: a hybrid hits only at these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

MAX_CHAIN = 256
"""Most blocks of one BlockStored."""


@dataclass(slots=True)
class BlockStored:
    """Blocks that follow each other in a prefix, the first one after the block `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before; None for a prompt's first block."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens of all blocks; empty if they are not published."""


@dataclass(slots=True)
class BlockRemoved:
    """Blocks that are not cached any more."""

    block_hashes: list[int]


@dataclass(slots=True)
class AllBlocksCleared:
    """Note that nothing is cached any more."""


@dataclass(slots=True)
class CheckpointStored:
    """A checkpoint after the block `block_hash`, which ends `position` tokens after the start."""

    block_hash: int
    position: int


@dataclass(slots=True)
class CheckpointRemoved:
    """A checkpoint that is not cached any more. Its block may be."""

    block_hash: int
    position: int


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | CheckpointStored | CheckpointRemoved


class CacheEventLog:
    """Log of one index's events until they are taken. Blocks that follow each other share an event."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def store_block(self, key: int, parent_key: int | None, token_ids: Sequence[int]) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent_key and len(last.block_hashes) < MAX_CHAIN:
            last.block_hashes.append(key)
            last.token_ids += token_ids
        else:
            self._events.append(BlockStored([key], parent_key, list(token_ids)))

    def remove_block(self, key: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and len(last.block_hashes) < MAX_CHAIN:
            last.block_hashes.append(key)
        else:
            self._events.append(BlockRemoved([key]))

    def store_checkpoint(self, key: int, position: int) -> None:
        self._events.append(CheckpointStored(key, position))

    def remove_checkpoint(self, key: int, position: int) -> None:
        self._events.append(CheckpointRemoved(key, position))

    def clear(self) -> None:
        """Note that the index is empty. What was noted before does not matter any more."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


class CacheContents:
    """Contents of an index as its events tell them, for readers that come later."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        """Parent's hash and tokens by a block's hash; a block stands after its parent."""
        self.checkpoints: dict[int, int] = {}
        """Position by the hash of the checkpoint's block."""

    def apply(self, event: CacheEvent) -> None:
        """Follow the index by one event."""
        match event:
            case BlockStored(block_hashes, parent, token_ids):
                size = len(token_ids) // len(block_hashes)
                for index, key in enumerate(block_hashes):
                    self.blocks[key] = parent, token_ids[index * size : (index + 1) * size]
                    parent = key
            case BlockRemoved(block_hashes):
                for key in block_hashes:
                    self.blocks.pop(key, None)
            case CheckpointStored(key, position):
                self.checkpoints[key] = position
            case CheckpointRemoved(key):
                self.checkpoints.pop(key, None)
            case AllBlocksCleared():
                self.blocks.clear()
                self.checkpoints.clear()

    def replay(self) -> Iterator[tuple[int, list[CacheEvent]]]:
        """Return batches of events that lead from an empty index to these contents, of at most `MAX_CHAIN` blocks each.

        Each comes with the number of those after it, and is made when it is taken. Later changes do not touch them.
        """
        left = -(-len(self.blocks) // MAX_CHAIN) - (-len(self.checkpoints) // MAX_CHAIN)
        # Keys and values are copied apart: a copy of the items makes a tuple of each, and takes 40 times as long.
        blocks = zip(list(self.blocks), list(self.blocks.values()), strict=True)
        checkpoints = zip(list(self.checkpoints), list(self.checkpoints.values()), strict=True)
        return zip(range(left, -1, -1), _replay(blocks, checkpoints), strict=True)


def _replay(
    blocks: Iterator[tuple[int, tuple[int | None, list[int]]]], checkpoints: Iterator[tuple[int, int]]
) -> Iterator[list[CacheEvent]]:
    yield [AllBlocksCleared()]
    log = CacheEventLog()
    while part := list(islice(blocks, MAX_CHAIN)):
        for key, (parent, token_ids) in part:
            log.store_block(key, parent, token_ids)
        yield log.take()
    while positions := list(islice(checkpoints, MAX_CHAIN)):
        yield [CheckpointStored(key, position) for key, position in positions]
