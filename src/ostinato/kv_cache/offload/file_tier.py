"""The file tier between the store and a directory: it keeps what leaves the index and brings it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ostinato.kv_cache.offload.directory import FILE_KINDS, CacheDirectory, FileKind
from ostinato.kv_cache.offload.file_format import file_bytes
from ostinato.kv_cache.prefix_index import IndexEntry
from ostinato.kv_cache.request_cache import CacheMemory


@dataclass(frozen=True, slots=True)
class FileRates:
    """Rates for comparing reads with computing: reading pays if it takes less time at these rates."""

    bytes_per_second: float
    flops_per_second: float


class FileTier:
    """Files as a tier below the index, which knows entries by `file_key`, a digest of all tokens up to them."""

    def __init__(self, directory: CacheDirectory, memory: CacheMemory, root: bytes, rates: FileRates) -> None:
        """Set up the tier. `root` is the name before a first block: of the model and of the layout of its memory."""
        self.directory, self.memory, self.root = directory, memory, root
        self._rates = rates

    def save_block(self, entry: IndexEntry) -> None:
        """Keep an entry's block, whose memory is reused after this."""
        memory = self.memory
        self._save("block", entry, memory.block_bytes, lambda into: memory.read_block(entry.block, into=into))

    def save_window_block(self, entry: IndexEntry, window_block: int) -> None:
        """Keep an entry's window block, whose memory is reused after this."""
        memory = self.memory
        self._save(
            "pane", entry, memory.window_block_bytes, lambda into: memory.read_window_block(window_block, into=into)
        )

    def save_window(self, window: Iterable[IndexEntry]) -> bool:
        """Keep these entries' window blocks. Return False, and keep none, if one is neither in memory nor in files."""
        window = tuple(window)
        if any(
            window_entry.window_block is None and not self.has_window_block(window_entry.file_key)
            for window_entry in window
        ):
            return False
        for window_entry in window:
            if window_entry.window_block is not None:
                self.save_window_block(window_entry, window_entry.window_block.id)
        return True

    def save_state(self, entry: IndexEntry, slot: int, packed: memoryview | None = None) -> None:
        """Keep a checkpoint, whose slot is reused after this; or the contents of one that is `packed`."""
        memory = self.memory

        def copy(into: memoryview) -> None:
            if packed is None:
                memory.read_checkpoint(slot, into=into)
            else:
                into[:] = packed

        self._save("state", entry, memory.checkpoint_bytes, copy)

    def bytes_of(self, entry: IndexEntry, with_window_block: bool = True) -> int:
        """Return the bytes of the files that keep an entry."""
        sizes = [self.memory.block_bytes] if entry.block else []
        sizes += [self.memory.window_block_bytes] if entry.window_block is not None and with_window_block else []
        sizes += [self.memory.checkpoint_bytes] if entry.checkpoint is not None else []
        return sum(file_bytes(len(entry.token_ids), size) for size in sizes)

    def has_block(self, name: bytes) -> bool:
        return self.directory.has("block", name)

    def has_window_block(self, name: bytes) -> bool:
        return self.directory.has("pane", name)

    def has_state(self, name: bytes) -> bool:
        return self.directory.has("state", name)

    def read_block(self, name: bytes, token_ids: tuple[int, ...]) -> memoryview | None:
        """Return what `save_block` kept, or None if it is gone or damaged."""
        return self.directory.read("block", name, token_ids, self.memory.block_bytes)

    def read_window_block(self, name: bytes, token_ids: tuple[int, ...]) -> memoryview | None:
        return self.directory.read("pane", name, token_ids, self.memory.window_block_bytes)

    def read_state(self, name: bytes, token_ids: tuple[int, ...]) -> memoryview | None:
        return self.directory.read("state", name, token_ids, self.memory.checkpoint_bytes)

    def touch(self, names: Sequence[bytes]) -> None:
        """Note that a prefix was used: its files stay longest, its first blocks longer than those after them."""
        for name in reversed(names):
            for kind in reversed(FILE_KINDS):
                self.directory.touch(kind, name)

    def is_worth_reading(self, num_bytes: int, flops: float) -> bool:
        """Return whether reading `num_bytes` takes less time than computing `flops`."""
        return num_bytes / self._rates.bytes_per_second < flops / self._rates.flops_per_second

    def _save(self, kind: FileKind, entry: IndexEntry, size: int, copy: Callable[[memoryview], object]) -> None:
        if size:
            self.directory.write(kind, entry.file_key, entry.token_ids, size, copy)
