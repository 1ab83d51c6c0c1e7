"""Memory of blocks, window blocks and slots of all ranks as bytes: the ranks' parts, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ostinato.cache.memory import CacheMemory

What = Literal["block", "pane", "slot"]


@dataclass(frozen=True)
class Read:
    """A request for a rank's part of a block, a window block or a slot.

    With `num_tokens`, only that number of tokens of a block or window block is wanted.
    """

    what: What
    number: int
    num_tokens: int | None = None

    def of(self, memory: CacheMemory) -> memoryview:
        match self.what:
            case "block":
                return memory.read_block(self.number, self.num_tokens)
            case "pane":
                return memory.read_pane(self.number, self.num_tokens)
            case "slot":
                return memory.read_slot(self.number)


@dataclass(frozen=True)
class Write:
    """New bytes of a rank's part of a block, a window block or a slot."""

    what: What
    number: int
    contents: bytes

    def to(self, memory: CacheMemory) -> None:
        write = {"block": memory.write_block, "pane": memory.write_pane, "slot": memory.write_slot}[self.what]
        write(self.number, memoryview(self.contents))


class Others(Protocol):
    """The first rank's connection with the others (`Leader`), between two steps."""

    def read(self, asked: Read) -> Sequence[bytes]:
        """Return the parts of the other ranks. RankError if one is gone or does not answer."""
        ...

    def write(self, parts: Sequence[Write]) -> None:
        """Send each of the other ranks its part. RankError if one is gone."""
        ...


class MemoryOfRanks:
    """A `CacheMemory` on the first rank.

    A block, a window block and a slot have the same number and the same size on all ranks.
    """

    def __init__(self, own: CacheMemory, others: Others, ranks: int) -> None:
        self._own, self._others = own, others
        self.block_bytes, self.pane_bytes, self.slot_bytes = (
            ranks * each for each in (own.block_bytes, own.pane_bytes, own.slot_bytes)
        )

    def read_block(self, block: int, num_tokens: int | None = None, into: memoryview | None = None) -> memoryview:
        return self._read(Read("block", block, num_tokens), into)

    def write_block(self, block: int, contents: memoryview) -> None:
        self._write("block", block, contents, self._own.block_bytes)

    def read_pane(self, pane: int, num_tokens: int | None = None, into: memoryview | None = None) -> memoryview:
        return self._read(Read("pane", pane, num_tokens), into)

    def write_pane(self, pane: int, contents: memoryview) -> None:
        self._write("pane", pane, contents, self._own.pane_bytes)

    def read_slot(self, slot: int, into: memoryview | None = None) -> memoryview:
        return self._read(Read("slot", slot), into)

    def write_slot(self, slot: int, contents: memoryview) -> None:
        self._write("slot", slot, contents, self._own.slot_bytes)

    def _read(self, asked: Read, into: memoryview | None) -> memoryview:
        others = self._others.read(asked)
        parts: list[bytes | memoryview] = [asked.of(self._own), *others]
        if into is None:
            return memoryview(b"".join(parts))
        begin = 0
        for part in parts:
            into[begin : begin + len(part)] = part
            begin += len(part)
        return into

    def _write(self, what: What, number: int, contents: memoryview, size: int) -> None:
        parts = [Write(what, number, bytes(contents[at : at + size])) for at in range(0, len(contents), size)]
        self._others.write(parts[1:])
        parts[0].to(self._own)
