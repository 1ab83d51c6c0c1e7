"""Memory of blocks, window blocks and slots of all ranks as bytes: the ranks' parts, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ostinato.kv_cache.request_cache import CacheMemory, MemoryKind


@dataclass(frozen=True)
class ReadMemory:
    """A request for a rank's part of a block, a window block or a slot.

    With `num_tokens`, only that number of tokens of a block or window block is wanted.
    """

    kind: MemoryKind
    id: int
    num_tokens: int | None = None

    def of(self, memory: CacheMemory) -> memoryview:
        return memory.read(self.kind, self.id, self.num_tokens)


@dataclass(frozen=True)
class WriteMemory:
    """New bytes of a rank's part of a block, a window block or a slot."""

    kind: MemoryKind
    id: int
    contents: bytes

    def to(self, memory: CacheMemory) -> None:
        memory.write(self.kind, self.id, memoryview(self.contents))


class FollowerMemory(Protocol):
    """The first rank's connection with the others (`LeaderRank`), between two steps."""

    def read(self, asked: ReadMemory) -> Sequence[bytes]:
        """Return the parts of the other ranks. RankError if one is gone or does not answer."""

    def write(self, parts: Sequence[WriteMemory]) -> None:
        """Send each of the other ranks its part. RankError if one is gone."""


class RankedCacheMemory:
    """A `CacheMemory` on the first rank.

    A block, a window block and a slot have the same number and the same size on all ranks.
    """

    def __init__(self, own: CacheMemory, others: FollowerMemory, ranks: int) -> None:
        self._own, self._others = own, others
        self.sizes: Mapping[MemoryKind, int] = {kind: ranks * size for kind, size in own.sizes.items()}

    def read(
        self, kind: MemoryKind, id: int, num_tokens: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        asked = ReadMemory(kind, id, num_tokens)
        others = self._others.read(asked)
        parts: list[bytes | memoryview] = [asked.of(self._own), *others]
        if into is None:
            return memoryview(b"".join(parts))
        begin = 0
        for part in parts:
            into[begin : begin + len(part)] = part
            begin += len(part)
        return into

    def write(self, kind: MemoryKind, id: int, contents: memoryview) -> None:
        size = self._own.sizes[kind]
        parts = [WriteMemory(kind, id, bytes(contents[at : at + size])) for at in range(0, len(contents), size)]
        self._others.write(parts[1:])
        parts[0].to(self._own)
