"""Block hashes: full blocks of a request's tokens, each hashed together with all blocks before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

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


def xxh3_hash(before: int, content: bytes) -> int:
    """Return a fast hash, which is not cryptographic.

    The index compares what it finds, so a collision costs a hit and no more.
    """
    digest: int = xxhash.xxh3_64_intdigest(content, seed=before)
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
        """Set up an empty list of blocks; they get `names` too if `root`, the name before the first block, is given."""
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
                before = self.file_keys[-1] if index else self._root
                self.file_keys.append(hashlib.blake2b(before + content, digest_size=len(self._root)).digest())

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
