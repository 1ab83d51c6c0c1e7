"""What leaves the index goes to files, and comes back from them: between the store and a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ostinato.cache.files.directory import KINDS, CacheDirectory, Kind
from ostinato.cache.files.packed import packed_bytes
from ostinato.cache.index import Entry
from ostinato.cache.memory import CacheMemory


@dataclass(frozen=True, slots=True)
class FileRates:
    """Reading pays where it takes less time than computing at these rates."""

    bytes_per_second: float
    flops_per_second: float


class FileTier:
    """Files beside the index. Entries are known by `Entry.name`, which is a digest of all tokens up to them."""

    def __init__(self, directory: CacheDirectory, memory: CacheMemory, root: bytes, rates: FileRates) -> None:
        """`root` is the name before a text's first block: of the model and of the layout of its memory."""
        self.directory, self.memory, self.root = directory, memory, root
        self._rates = rates

    def save_block(self, entry: Entry) -> None:
        """Keeps an entry's block, whose memory is given to others after this."""
        memory = self.memory
        self._save("block", entry, memory.block_bytes, lambda into: memory.read_block(entry.block, into=into))

    def save_pane(self, entry: Entry, pane: int) -> None:
        """Keeps an entry's pane, whose memory is given to others after this."""
        memory = self.memory
        self._save("pane", entry, memory.pane_bytes, lambda into: memory.read_pane(pane, into=into))

    def save_window(self, window: Iterable[Entry]) -> bool:
        """Keeps the panes of these entries; False, and nothing is kept, if one of them is neither in memory nor in
        files."""
        window = tuple(window)
        if any(each.pane is None and not self.has_pane(each.name) for each in window):
            return False
        for each in window:
            if each.pane is not None:
                self.save_pane(each, each.pane.id)
        return True

    def save_state(self, entry: Entry, slot: int) -> None:
        """Keeps a checkpoint, whose slot is given to others after this."""
        memory = self.memory
        self._save("state", entry, memory.slot_bytes, lambda into: memory.read_slot(slot, into=into))

    def bytes_of(self, entry: Entry, with_pane: bool = True) -> int:
        """Of the files that keep an entry."""
        sizes = [self.memory.block_bytes] if entry.block else []
        sizes += [self.memory.pane_bytes] if entry.pane is not None and with_pane else []
        sizes += [self.memory.slot_bytes] if entry.checkpoint is not None else []
        return sum(packed_bytes(len(entry.token_ids), size) for size in sizes)

    def has_block(self, name: bytes) -> bool:
        return self.directory.has("block", name)

    def has_pane(self, name: bytes) -> bool:
        return self.directory.has("pane", name)

    def has_state(self, name: bytes) -> bool:
        return self.directory.has("state", name)

    def read_block(self, name: bytes, token_ids: tuple[int, ...]) -> memoryview | None:
        """What `save_block` kept; None if it is gone or damaged."""
        return self.directory.read("block", name, token_ids, self.memory.block_bytes)

    def read_pane(self, name: bytes, token_ids: tuple[int, ...]) -> memoryview | None:
        return self.directory.read("pane", name, token_ids, self.memory.pane_bytes)

    def read_state(self, name: bytes, token_ids: tuple[int, ...]) -> memoryview | None:
        return self.directory.read("state", name, token_ids, self.memory.slot_bytes)

    def use(self, names: Sequence[bytes]) -> None:
        """Notes that a text was used: its files stay longest, those at its beginning longer than those behind them."""
        for name in reversed(names):
            for kind in reversed(KINDS):
                self.directory.use(kind, name)

    def pays(self, num_bytes: int, flops: float) -> bool:
        """Whether reading so much takes less time than computing it."""
        return num_bytes / self._rates.bytes_per_second < flops / self._rates.flops_per_second

    def _save(self, kind: Kind, entry: Entry, size: int, copy: Callable[[memoryview], object]) -> None:
        if size:
            self.directory.write(kind, entry.name, entry.token_ids, size, copy)
