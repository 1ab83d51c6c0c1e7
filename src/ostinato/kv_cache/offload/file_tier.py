"""The file tier between the store and a directory: it keeps what leaves the index and brings it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ostinato.kv_cache.offload.directory import FILE_KINDS, CacheDirectory, FileKind
from ostinato.kv_cache.offload.file_format import file_bytes
from ostinato.kv_cache.prefix_index import IndexEntry
from ostinato.kv_cache.request_cache import CacheMemory, MemoryKind

_ON_DISK: dict[MemoryKind, FileKind] = {"block": "block", "window_block": "pane", "checkpoint": "state"}
"""Kind of memory -> kind of file."""


@dataclass(frozen=True, slots=True)
class FileRates:
    """Rates for comparing reads with computing: reading pays if it takes less time at these rates."""

    bytes_per_second: float
    flops_per_second: float


class FileTier:
    """Files as a tier below the index.

    Entries are known by `IndexEntry.file_key`, a digest of all tokens up to them.
    """

    def __init__(self, directory: CacheDirectory, memory: CacheMemory, root: bytes, rates: FileRates) -> None:
        """Set up the tier. `root` is the name before a first block: of the model and of the layout of its memory."""
        self.directory, self.memory, self.root = directory, memory, root
        self._rates = rates

    def save_block(self, entry: IndexEntry) -> None:
        """Keep an entry's block, whose memory is reused after this."""
        self._save("block", entry, lambda into: self.memory.read("block", entry.block, into=into))

    def save_window_block(self, entry: IndexEntry, window_block: int) -> None:
        """Keep an entry's window block, whose memory is reused after this."""
        self._save("window_block", entry, lambda into: self.memory.read("window_block", window_block, into=into))

    def save_window(self, window: Iterable[IndexEntry]) -> bool:
        """Keep these entries' window blocks. Return False, and keep none, if one is neither in memory nor in files."""
        window = tuple(window)
        if any(
            window_entry.window_block is None and not self.has("window_block", window_entry.file_key)
            for window_entry in window
        ):
            return False
        for window_entry in window:
            if window_entry.window_block is not None:
                self.save_window_block(window_entry, window_entry.window_block.id)
        return True

    def save_state(self, entry: IndexEntry, slot: int, packed: memoryview | None = None) -> None:
        """Keep a checkpoint, whose slot is reused after this; or the contents of one that is `packed`."""

        def copy(into: memoryview) -> None:
            if packed is None:
                self.memory.read("checkpoint", slot, into=into)
            else:
                into[:] = packed

        self._save("checkpoint", entry, copy)

    def bytes_of(self, entry: IndexEntry, with_window_block: bool = True) -> int:
        """Return the bytes of the files that keep an entry."""
        kinds: list[MemoryKind] = ["block"] if entry.block else []
        kinds += ["window_block"] if entry.window_block is not None and with_window_block else []
        kinds += ["checkpoint"] if entry.checkpoint is not None else []
        return sum(file_bytes(len(entry.token_ids), self.memory.sizes[kind]) for kind in kinds)

    def has(self, kind: MemoryKind, name: bytes) -> bool:
        return self.directory.has(_ON_DISK[kind], name)

    def read(self, kind: MemoryKind, name: bytes, token_ids: tuple[int, ...]) -> memoryview | None:
        """Return what was kept, or None if it is gone or damaged."""
        return self.directory.read(_ON_DISK[kind], name, token_ids, self.memory.sizes[kind])

    def touch(self, names: Sequence[bytes]) -> None:
        """Note that a prefix was used: its files stay longest, its first blocks longer than those after them."""
        for name in reversed(names):
            for kind in reversed(FILE_KINDS):
                self.directory.touch(kind, name)

    def is_worth_reading(self, num_bytes: int, flops: float) -> bool:
        """Return whether reading `num_bytes` takes less time than computing `flops`."""
        return num_bytes / self._rates.bytes_per_second < flops / self._rates.flops_per_second

    def _save(self, kind: MemoryKind, entry: IndexEntry, copy: Callable[[memoryview], object]) -> None:
        if size := self.memory.sizes[kind]:
            self.directory.write(_ON_DISK[kind], entry.file_key, entry.token_ids, size, copy)
