"""One file of the cache: a head, the tokens and the contents, with a checksum over all of them."""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import xxhash

MAGIC = b"OSTCACH1"
"""With the version of what follows it."""
HEAD = struct.Struct("<8s16s16sI")
"""Magic; xxh3 of all behind it; the name; how many tokens stand before the contents."""
NAME_BYTES = 16
TOKEN_BYTES = 8
CHECKED_FROM = len(MAGIC) + 16


def packed_bytes(num_tokens: int, size: int) -> int:
    """Of a file with contents of `size` bytes."""
    return HEAD.size + TOKEN_BYTES * num_tokens + size


def pack(name: bytes, token_ids: Sequence[int], contents: memoryview) -> list[bytes | memoryview]:
    """A file's bytes, in parts, of which the contents are the last: they are not copied."""
    tokens = array("q", token_ids).tobytes()
    head = HEAD.pack(MAGIC, bytes(16), name, len(token_ids)) + tokens
    checksum = _checksum(memoryview(head)[CHECKED_FROM:], contents)
    return [MAGIC + checksum + head[CHECKED_FROM:], contents]


def unpack(packed: memoryview, name: bytes, token_ids: Sequence[int]) -> memoryview | None:
    """The contents, if nothing about them is other than expected. `packed` has the size that it should have."""
    tokens = array("q", token_ids).tobytes()
    magic, checksum, of, count = HEAD.unpack_from(packed)
    if (magic, of, count) != (MAGIC, name, len(token_ids)) or checksum != _checksum(packed[CHECKED_FROM:]):
        return None
    if packed[HEAD.size : HEAD.size + len(tokens)] != tokens:
        return None
    return packed[HEAD.size + len(tokens) :]


def read_file(path: Path, size: int) -> memoryview | None:
    """A file's bytes; None if it has not that size, or is something else than a file. OSError if it cannot be read."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode) or about.st_size != size:
            return None
        with open(opened, "rb", closefd=False) as file:
            packed = file.read(size)
    finally:
        os.close(opened)
    return memoryview(packed) if len(packed) == size else None


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """For the owner alone, whatever the umask says."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        for part in parts:
            file.write(part)


def _checksum(*parts: memoryview) -> bytes:
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(part)
    digest: bytes = whole.digest()
    return digest
