"""Prefix index: blocks and checkpoints of cached prefixes, as a tree of full blocks; and the report of a hit.

A full block's key is its block hash, made of its tokens and of all blocks before it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import xxhash

from ostinato.kv_cache.cache_events import CacheEventLog

BlockHashFn = Callable[[int, bytes], int]
"""Function (hash of the block before, or 0; the block's content as bytes) -> hash of all tokens up to the block's end.
"""


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens `start` to `end - 1`, which are an image or one temporal patch of a video.

    `digest` is a cryptographic digest of its pixels and of how they are processed, since the tokens themselves are the
    same for every image.
    """

    start: int
    end: int
    digest: str
    item: Any = field(default=None, compare=False, repr=False)
    """The encoder's input; the cache and the scheduler do not look into it."""


def whole_prompt_span(token_ids: Sequence[int]) -> MediaSpan:
    """Return a span over a whole prompt, which makes its blocks differ from those of any other prompt.

    The keys of a prefix LM's prompt depend on all of its tokens, as those of an image do on the whole image.
    """
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=32).hexdigest()
    return MediaSpan(0, len(token_ids), f"prompt {digest}")


def xxh3_hash(previous_hash: int, content: bytes) -> int:
    """Return a fast, not cryptographic hash. The index compares what it finds, so a collision costs only a hit."""
    digest: int = xxhash.xxh3_64_intdigest(content, seed=previous_hash)
    return digest


class BlockHashes:
    """The block hashes of one request, for the full blocks that `extend` has seen.

    Block i holds the tokens at `i * block_size` to `(i + 1) * block_size - 1` and the digests of the images in them.
    `salt` separates requests that must not find each other's blocks.
    """

    def __init__(
        self,
        block_size: int,
        salt: str | None = None,
        media: Sequence[MediaSpan] = (),
        block_hash: BlockHashFn = xxh3_hash,
        root: bytes | None = None,
    ) -> None:
        """Set up an empty list of blocks; they get `file_keys` if `root`, the name before the first block, is given."""
        self.block_size = block_size
        self.salt = salt
        self.keys: list[int] = []
        self.file_keys: list[bytes] = []
        """Cryptographic digests of the tokens up to each block's end.

        Files are found by them, and a file is not compared with the blocks before it.
        """
        self.token_ids: list[tuple[int, ...]] = []
        self._media = tuple(media)
        self._hash = block_hash
        self._root = root

    def extend(self, tokens: Callable[[int, int], tuple[int, ...]], num_tokens: int) -> None:
        """Append the blocks that `num_tokens` tokens fill; `tokens(start, end)` gives those at these positions."""
        size = self.block_size
        for index in range(len(self.keys), num_tokens // size):
            token_ids = tokens(index * size, (index + 1) * size)
            content = array("q", token_ids).tobytes()
            if index == 0 and self.salt is not None:
                content += _length_prefixed(b"salt", self.salt)
            for digest in self.digests(index):
                content += _length_prefixed(b"media", digest)
            self.keys.append(self._hash(self.keys[-1] if index else 0, content))
            self.token_ids.append(token_ids)
            if self._root is not None:
                previous_key = self.file_keys[-1] if index else self._root
                self.file_keys.append(hashlib.blake2b(previous_key + content, digest_size=len(self._root)).digest())

    def digests(self, index: int) -> tuple[str, ...]:
        """Return the digests of the images in block `index`, in order."""
        if not self._media:
            return ()
        start, end = index * self.block_size, (index + 1) * self.block_size
        return tuple(span.digest for span in self._media if span.start < end and span.end > start)


def _length_prefixed(kind: bytes, text: str) -> bytes:
    """Return `text` as bytes with its kind and its length before it.

    The length keeps one text from ending in what looks like another: a block's name alone distinguishes its file from
    others.
    """
    encoded = text.encode()
    return kind + len(encoded).to_bytes(8, "little") + encoded


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A slot that holds the state after the last token of an entry's block. It is never written."""

    entry: IndexEntry
    slot: int
    """The slot; the negative id of its place if it is packed (`PackedStates`)."""
    is_interior: bool
    """True if it is here only as a multiple of `state_block_size`.

    False if a prompt ended here or left another prefix.
    """
    last_use: int
    hits: int = 0


@dataclass(slots=True, eq=False)
class WindowBlock:
    """A window block: keys and values of an entry's block in layers with a window. It is never written."""

    entry: IndexEntry
    id: int
    last_use: int
    is_interior: bool = True
    """True if no known prefix ends or branches off so near behind it that it needs this window block to continue."""
    hits: int = 0


@dataclass(slots=True, eq=False)
class Pin:
    """Protection of an entry against eviction, at the wish of an application."""

    client: str | None
    """The client whose share it counts in."""
    ttl: float
    """Seconds for which it lasts from each use on."""
    end: float
    """Time at which it ends."""


@dataclass(slots=True, eq=False)
class IndexEntry:
    """One full block after its parent's. `end` is the position after its last token."""

    key: int
    parent: IndexEntry | None
    token_ids: tuple[int, ...]
    digests: tuple[str, ...]
    salt: str | None
    end: int
    block: int
    """Block id; 0 in a model without attention, or with windows in all layers."""
    last_use: int
    checkpoint: Checkpoint | None = None
    window_block: WindowBlock | None = None
    """The window block. None in a model without windows, and after eviction."""
    hits: int = 0
    """Requests that took the prefix up to here, and no further, from the index."""
    lost_checkpoint: bool = False
    """True if there was a checkpoint here that was evicted."""
    num_children: int = 0
    num_holders: int = 0
    """Running requests whose last indexed block this is."""
    pin: Pin | None = None
    """Pin of the entry, if an application has marked this position."""
    num_pinned: int = 0
    """Pinned entries among this one and those that extend it."""
    num_windows_pinned: int = 0
    """Pinned entries that cannot be hit without this one's window block."""
    file_key: bytes = b""
    """Name by which its files are found; empty without a file tier."""
    previous_checkpoint: IndexEntry | None = None
    """The nearest earlier entry with a checkpoint (None: root), as of change `previous_checkpoint_version`."""
    previous_checkpoint_version: int = -1

    @property
    def is_evictable(self) -> bool:
        """True if no indexed prefix extends it, and it is not the last indexed block of a running request."""
        return self.num_children == 0 and self.num_holders == 0


class PrefixIndex:
    """The tree of entries. It counts children and holders; its owner manages the memory of blocks and slots.

    Entries are found by the hash of all tokens up to them, and then compared: parent, tokens, digests and salt. So two
    prefixes of one hash never share an entry: the one that came later is not indexed from there on.
    """

    def __init__(self) -> None:
        self._entries: dict[int, IndexEntry] = {}
        self._leaves: dict[IndexEntry, None] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._window_blocks: dict[int, WindowBlock] = {}
        self._num_changes = 0
        """Checkpoints added and removed so far."""
        self._events: CacheEventLog | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[IndexEntry]:
        return iter(self._entries.values())

    def __contains__(self, entry: IndexEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def publish(self) -> CacheEventLog:
        """Note all changes from now on in a log, which begins with the present contents."""
        if self._events is None:
            self._events = log = CacheEventLog()
            for entry in self:
                log.store_block(entry.key, None if entry.parent is None else entry.parent.key, entry.token_ids)
            for checkpoint in self.checkpoints:
                log.store_checkpoint(checkpoint.entry.key, checkpoint.entry.end)
        return self._events

    def note_cleared(self) -> None:
        """Note for readers of events that the index is empty because everything was dropped."""
        assert not self._entries, "the index is not empty"
        if self._events is not None:
            self._events.clear()

    @property
    def leaves(self) -> Iterator[IndexEntry]:
        """Entries that no other entry extends."""
        return iter(self._leaves)

    @property
    def newest_leaves(self) -> Iterator[IndexEntry]:
        """Entries that no other entry extends, the newest first."""
        return reversed(self._leaves)

    @property
    def num_leaves(self) -> int:
        return len(self._leaves)

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def checkpoints(self) -> Iterator[Checkpoint]:
        return iter(self._checkpoints.values())

    @property
    def window_blocks(self) -> Iterator[WindowBlock]:
        return iter(self._window_blocks.values())

    def window_block_of(self, id: int) -> WindowBlock | None:
        """Return the window block with this id, or None if the index does not have it."""
        return self._window_blocks.get(id)

    def checkpoint_of(self, slot: int) -> Checkpoint | None:
        """Return the checkpoint in this slot, or None if it holds none."""
        return self._checkpoints.get(slot)

    def child(self, parent: IndexEntry | None, block_hashes: BlockHashes, index: int) -> IndexEntry | None:
        """Return the entry of block `index` of `block_hashes`, or None; `parent` is the entry of the block before."""
        entry = self._entries.get(block_hashes.keys[index])
        if (
            entry is not None
            and entry.parent is parent
            and entry.token_ids == block_hashes.token_ids[index]
            and entry.digests == block_hashes.digests(index)
            and entry.salt == block_hashes.salt
        ):
            return entry
        return None

    def walk(self, block_hashes: BlockHashes, num_blocks: int) -> list[IndexEntry]:
        """Return the entries of the first `num_blocks` blocks, up to the first that is not indexed."""
        path: list[IndexEntry] = []
        for index in range(min(num_blocks, len(block_hashes.keys))):
            entry = self.child(path[-1] if path else None, block_hashes, index)
            if entry is None:
                break
            path.append(entry)
        return path

    def add(
        self, parent: IndexEntry | None, block_hashes: BlockHashes, index: int, block: int, now: int
    ) -> IndexEntry | None:
        """Add block `index` of `block_hashes`; return None if other tokens have its hash."""
        key = block_hashes.keys[index]
        if key in self._entries:
            return None
        end = (index + 1) * block_hashes.block_size
        digests = block_hashes.digests(index)
        name = block_hashes.file_keys[index] if block_hashes.file_keys else b""
        entry = IndexEntry(
            key, parent, block_hashes.token_ids[index], digests, block_hashes.salt, end, block, now, file_key=name
        )
        self._entries[key] = entry
        self._leaves[entry] = None
        if parent is not None:
            parent.num_children += 1
            self._leaves.pop(parent, None)
        if self._events is not None:
            self._events.store_block(key, None if parent is None else parent.key, entry.token_ids)
        return entry

    def remove(self, entry: IndexEntry) -> None:
        """Remove an evictable entry without a checkpoint and without a window block."""
        assert entry.is_evictable, "an entry that is needed cannot be removed"
        assert entry.checkpoint is None, "a checkpoint is taken out before its entry"
        assert entry.window_block is None, "a window block is taken out before its entry"
        del self._entries[entry.key]
        del self._leaves[entry]
        if self._events is not None:
            self._events.remove_block(entry.key)
        parent = entry.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.num_children == 0:
                self._leaves[parent] = None

    def add_checkpoint(self, entry: IndexEntry, slot: int, is_interior: bool, now: int) -> Checkpoint:
        """Add a checkpoint to an entry."""
        assert entry.checkpoint is None, "an entry has one checkpoint at most"
        checkpoint = Checkpoint(entry, slot, is_interior, now)
        entry.checkpoint = checkpoint
        entry.lost_checkpoint = False
        self._checkpoints[slot] = checkpoint
        self._num_changes += 1
        if self._events is not None:
            self._events.store_checkpoint(entry.key, entry.end)
        return checkpoint

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove an entry's checkpoint; its block stays."""
        assert checkpoint.entry.checkpoint is checkpoint, "the checkpoint is not in the index"
        checkpoint.entry.checkpoint = None
        del self._checkpoints[checkpoint.slot]
        self._num_changes += 1
        if self._events is not None:
            self._events.remove_checkpoint(checkpoint.entry.key, checkpoint.entry.end)

    def move_checkpoint(self, checkpoint: Checkpoint, slot: int) -> None:
        """Note that a checkpoint is in another slot or, with a negative one, packed."""
        del self._checkpoints[checkpoint.slot]
        checkpoint.slot = slot
        self._checkpoints[slot] = checkpoint

    def add_window_block(self, entry: IndexEntry, id: int, now: int) -> None:
        """Add a window block to an entry."""
        assert entry.window_block is None, "an entry has one window block at most"
        entry.window_block = self._window_blocks[id] = WindowBlock(entry, id, now)

    def remove_window_block(self, window_block: WindowBlock) -> None:
        """Remove an entry's window block; its block stays."""
        assert window_block.entry.window_block is window_block, "the window block is not in the index"
        window_block.entry.window_block = None
        del self._window_blocks[window_block.id]

    def previous_checkpoint_end(self, checkpoint: Checkpoint) -> int:
        """Return the position of the nearest checkpoint before this one; 0 if there is none.

        Costs one step for each block back to there. The entries on the way remember the answer until a checkpoint is
        added or removed, so that a look at all checkpoints passes no entry twice.
        """
        passed: list[IndexEntry] = []
        entry = checkpoint.entry.parent
        while entry is not None and entry.checkpoint is None:
            if entry.previous_checkpoint_version == self._num_changes:
                entry = entry.previous_checkpoint
                break
            passed.append(entry)
            entry = entry.parent
        for passed_entry in passed:
            passed_entry.previous_checkpoint, passed_entry.previous_checkpoint_version = entry, self._num_changes
        return 0 if entry is None else entry.end

    def check_integrity(self) -> None:
        """Raise AssertionError unless parents, children, leaves and checkpoints agree. O(entries)."""
        children: dict[IndexEntry | None, int] = {}
        for key, entry in self._entries.items():
            assert entry.key == key, "an entry is filed under another hash"
            parent = entry.parent
            children[parent] = children.get(parent, 0) + 1
            size = len(entry.token_ids)
            assert entry.end == (0 if parent is None else parent.end) + size, "an entry does not follow its parent"
            assert parent is None or self._entries.get(parent.key) is parent, "an entry outlived its parent"
            assert parent is None or parent.salt == entry.salt, "an entry has another salt than its parent"
        for entry in self:
            assert entry.num_children == children.get(entry, 0), "the children of an entry were miscounted"
            assert (entry in self._leaves) == (entry.num_children == 0), "the leaves are not the entries at the ends"
            if entry.checkpoint is not None:
                checkpoint = entry.checkpoint
                assert checkpoint.entry is entry, "a checkpoint belongs to another entry"
                assert self._checkpoints.get(checkpoint.slot) is checkpoint, "a checkpoint cannot be found by its slot"
                nearest = _nearest(entry.parent)
                assert self.previous_checkpoint_end(checkpoint) == (0 if nearest is None else nearest.end), (
                    "the end of the previous checkpoint is out of date"
                )
            if entry.window_block is not None:
                assert entry.window_block.entry is entry, "a window block belongs to another entry"
                assert self._window_blocks.get(entry.window_block.id) is entry.window_block, (
                    "a window block cannot be found by its id"
                )
        assert len(self._leaves) <= len(self._entries), "a leaf is not in the index"
        num_held = sum(entry.window_block is not None for entry in self)
        assert num_held == len(self._window_blocks), "a window block outlived its entry"
        num_held = sum(entry.checkpoint is not None for entry in self)
        assert num_held == len(self._checkpoints), "a checkpoint outlived its entry"


def _nearest(entry: IndexEntry | None) -> IndexEntry | None:
    """Return the nearest entry with a checkpoint, from `entry` towards the root."""
    while entry is not None and entry.checkpoint is None:
        entry = entry.parent
    return entry


class MissCause(StrEnum):
    """Reasons why tokens of a prompt had to be computed."""

    NEVER_SEEN = "never_seen"
    """No cached prefix had these tokens after the tokens before them."""
    EVICTED_BLOCK = "evicted_block"
    """Evicted: the block of these tokens was in the index and had to make room."""
    EVICTED_CHECKPOINT = "evicted_checkpoint"
    """Evicted state: the blocks of these tokens are cached; the state after them was, and had to make room."""
    NO_CHECKPOINT = "no_checkpoint"
    """No state: the blocks of these tokens are cached, and the state after them was not kept."""
    EVICTED_WINDOW = "evicted_window"
    """Evicted window: blocks and state are cached, but keys and values of layers with a window had to make room.

    Later tokens see those.
    """
    RECOMPUTED_TAIL = "recomputed_tail"
    """After the last block boundary before the prompt's end: less than a block, or the block of the last token."""
    DAMAGED = "damaged"
    """A file of the cache that would have had them, or the state after them, could not be read."""
    NOT_WANTED = "not_wanted"
    """The cache may not be used: it is off, or the request wants log-probabilities of its prompt."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Cache hit of one prompt. `cached_tokens` and `misses` (cause -> tokens) together add up to its length."""

    cached_tokens: int
    misses: dict[str, int] = field(default_factory=dict)
    checkpoint_spacing: int | None = None
    """Tokens between the checkpoints inside this prompt, if any are wanted there. It is `state_block_size`, doubled
    until the request takes no more than its share of the slots."""
    from_files: int = 0
    """Cached tokens that files brought back for this request."""
    marks: dict[int, bool] = field(default_factory=dict)
    """Block boundaries of the request's marks -> whether a pinned checkpoint stands there for later prompts."""
    nearest_mark: int | None = None
    """Position of the last pinned checkpoint before tokens that were missed as `no_checkpoint`; None without one."""

    @property
    def unpinned_marks(self) -> tuple[int, ...]:
        """Block boundaries of the marks that got no pinned checkpoint."""
        return tuple(end for end, is_pinned in self.marks.items() if not is_pinned)

    @property
    def created_tokens(self) -> int:
        """Tokens after the hit and up to the last mark whose checkpoint is pinned."""
        return max(0, max((end for end, is_pinned in self.marks.items() if is_pinned), default=0) - self.cached_tokens)


class RecentKeys:
    """Hashes of blocks that left the index, the last `max_keys` of them."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def add(self, key: int) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def discard(self, key: int) -> None:
        self._keys.pop(key, None)


def explain_misses(
    num_tokens: int,
    hit: int,
    matched: Sequence[IndexEntry],
    block_hashes: BlockHashes,
    evicted: RecentKeys,
    damaged: RecentKeys,
    reach: int = 0,
) -> dict[str, int]:
    """Return {cause: tokens} of a prompt of `num_tokens` tokens whose first `hit` are taken from the cache.

    `matched` are the entries of its blocks before the last boundary, up to the first that is not indexed; `damaged` are
    the hashes of blocks that had a file, or whose state had one, which could not be read; `reach` is that of `Match`.
    """
    causes: dict[MissCause, int] = dict.fromkeys(MissCause, 0)
    size = block_hashes.block_size
    boundary = (num_tokens - 1) // size * size
    keys = block_hashes.keys[: boundary // size]
    lost = max((entry.end for entry in matched[hit // size :] if entry.lost_checkpoint), default=hit)
    unread = max(((i + 1) * size for i, key in enumerate(keys) if key in damaged), default=0) if damaged else 0
    for index in range(hit // size, len(keys)):
        end = (index + 1) * size
        if end <= unread:
            cause = MissCause.DAMAGED
        elif end <= reach:
            cause = MissCause.EVICTED_WINDOW
        elif index < len(matched):
            cause = MissCause.EVICTED_CHECKPOINT if end <= lost else MissCause.NO_CHECKPOINT
        else:
            cause = MissCause.EVICTED_BLOCK if keys[index] in evicted else MissCause.NEVER_SEEN
        causes[cause] += size
    causes[MissCause.RECOMPUTED_TAIL] = num_tokens - boundary
    return {cause.value: tokens for cause, tokens in causes.items() if tokens}
