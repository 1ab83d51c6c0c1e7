"""Memory of blocks, window blocks and slots of all ranks as bytes: the ranks' parts, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ostinato.kv_cache.request_cache import CacheMemory

MemoryKind = Literal["block", "pane", "slot", "checkpoint"]


@dataclass(frozen=True)
class ReadMemory:
    """A request for a rank's part of a block, a window block or a slot.

    With `num_tokens`, only that number of tokens of a block or window block is wanted.
    """

    what: MemoryKind
    number: int
    num_tokens: int | None = None

    def of(self, memory: CacheMemory) -> memoryview:
        match self.what:
            case "block":
                return memory.read_block(self.number, self.num_tokens)
            case "pane":
                return memory.read_window_block(self.number, self.num_tokens)
            case "slot":
                return memory.read_slot(self.number)
            case "checkpoint":
                return memory.read_checkpoint(self.number)


@dataclass(frozen=True)
class WriteMemory:
    """New bytes of a rank's part of a block, a window block or a slot."""

    what: MemoryKind
    number: int
    contents: bytes

    def to(self, memory: CacheMemory) -> None:
        write = {
            "block": memory.write_block,
            "pane": memory.write_window_block,
            "slot": memory.write_slot,
            "checkpoint": memory.write_checkpoint,
        }[self.what]
        write(self.number, memoryview(self.contents))


class FollowerMemory(Protocol):
    """The first rank's connection with the others (`LeaderRank`), between two steps."""

    def read(self, asked: ReadMemory) -> Sequence[bytes]:
        """Return the parts of the other ranks. RankError if one is gone or does not answer."""
        ...

    def write(self, parts: Sequence[WriteMemory]) -> None:
        """Send each of the other ranks its part. RankError if one is gone."""
        ...


class RankedCacheMemory:
    """A `CacheMemory` on the first rank.

    A block, a window block and a slot have the same number and the same size on all ranks.
    """

    def __init__(self, own: CacheMemory, others: FollowerMemory, ranks: int) -> None:
        self._own, self._others = own, others
        self.block_bytes, self.window_block_bytes, self.slot_bytes, self.checkpoint_bytes = (
            ranks * each for each in (own.block_bytes, own.window_block_bytes, own.slot_bytes, own.checkpoint_bytes)
        )

    def read_block(self, block: int, num_tokens: int | None = None, into: memoryview | None = None) -> memoryview:
        return self._read(ReadMemory("block", block, num_tokens), into)

    def write_block(self, block: int, contents: memoryview) -> None:
        self._write("block", block, contents, self._own.block_bytes)

    def read_window_block(
        self, window_block: int, num_tokens: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        return self._read(ReadMemory("pane", window_block, num_tokens), into)

    def write_window_block(self, window_block: int, contents: memoryview) -> None:
        self._write("pane", window_block, contents, self._own.window_block_bytes)

    def read_slot(self, slot: int, into: memoryview | None = None) -> memoryview:
        return self._read(ReadMemory("slot", slot), into)

    def write_slot(self, slot: int, contents: memoryview) -> None:
        self._write("slot", slot, contents, self._own.slot_bytes)

    def read_checkpoint(self, slot: int, into: memoryview | None = None) -> memoryview:
        return self._read(ReadMemory("checkpoint", slot), into)

    def write_checkpoint(self, slot: int, contents: memoryview) -> None:
        self._write("checkpoint", slot, contents, self._own.checkpoint_bytes)

    def _read(self, asked: ReadMemory, into: memoryview | None) -> memoryview:
        others = self._others.read(asked)
        parts: list[bytes | memoryview] = [asked.of(self._own), *others]
        if into is None:
            return memoryview(b"".join(parts))
        begin = 0
        for part in parts:
            into[begin : begin + len(part)] = part
            begin += len(part)
        return into

    def _write(self, what: MemoryKind, number: int, contents: memoryview, size: int) -> None:
        parts = [WriteMemory(what, number, bytes(contents[at : at + size])) for at in range(0, len(contents), size)]
        self._others.write(parts[1:])
        parts[0].to(self._own)
