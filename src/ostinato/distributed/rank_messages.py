"""Messages between the first rank and another one, the limits of its waits, and the memory of all ranks as bytes.

The memory is that of blocks, window blocks and slots: the ranks' parts, in their order.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from ostinato.errors import OstinatoError, RankError
from ostinato.kv_cache.request_cache import CacheMemory, MemoryKind
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.tensor_parallel import Rank
from ostinato.runner.inputs import Drafts
from ostinato.scheduler.batch import Batch

RANK_TIMEOUT = 60.0
"""Seconds that the first rank waits for a rank that lives and does not come.

One that has died is noticed sooner. All ranks compute the same at the same time, so none is that far behind the others.
"""


def set_send_timeout(connection: Connection) -> None:
    """Limit sends to `RANK_TIMEOUT` from now on: BlockingIOError if the other side reads nothing meanwhile."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        limit = struct.pack("ll", int(RANK_TIMEOUT), int(RANK_TIMEOUT % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def rank_timeout_error(ranks: int) -> RankError:
    """Return the error for a rank that the first rank has waited for long enough."""
    return RankError(
        f"another of the {ranks} ranks of this engine lives, and has not answered for {RANK_TIMEOUT:g} s; "
        "start the engine again"
    )


@dataclass(frozen=True)
class RankStart:
    """Arguments that a rank is started with."""

    plan: Plan
    spec: ModelSpec
    directory: Path | None
    draft_directory: Path | None
    rank: Rank
    rendezvous_file: Path
    """File through which the ranks of a process group find each other."""
    shared_memory_fd: int | None = None
    """File descriptor of the shared memory that replaces the process group, if there is one."""


@dataclass(frozen=True)
class RankReady:
    """Note that a rank has finished a stage of its start."""


@dataclass(frozen=True)
class RankFailed:
    """Last message of a rank that ends with an error."""

    message: str

    @classmethod
    def by(cls, error: BaseException) -> RankFailed:
        """Return the message of this process, which `error` ends."""
        text = error.message if isinstance(error, OstinatoError) else repr(error)
        return cls(f"(process {os.getpid()}) failed: {text}")


@dataclass(frozen=True)
class RankStep:
    """A step to be computed, with all chunks of its logits."""

    batch: Batch
    drafts: Drafts

    @classmethod
    def of(cls, batch: Batch, drafts: Drafts) -> RankStep:
        """Return the step in the form that is sent: without sampling states and without the list of new requests."""
        rows = tuple(row._replace(sampling_state=None) for row in batch.rows)
        return cls(replace(batch, rows=rows, new_request_ids=()), drafts)


@dataclass(frozen=True)
class ChosenDrafts:
    """Drafts sampled from the logits that all ranks have just computed, by index of the logits."""

    tokens: dict[int, int]


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
