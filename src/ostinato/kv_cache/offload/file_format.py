"""One file of the cache: a head, the tokens and the contents, with a checksum over all of them."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

MAGIC = b"OSTCACH1"
"""Magic bytes, with the version of what follows them."""
HEAD = struct.Struct("<8s16s16sI")
"""Magic bytes; xxh3 of all behind it; the name; the number of tokens before the contents."""
NAME_BYTES = 16
TOKEN_BYTES = 8
CHECKSUM_START = len(MAGIC) + 16
DIRECT_IO_BYTES = 2**18
"""File size in bytes from which on a file is written past the page cache.

Writing through the page cache would take many times the processor's time, which the model needs; waiting for the disk
takes none.
"""


def file_bytes(num_tokens: int, size: int) -> int:
    """Return the bytes of a file with contents of `size` bytes."""
    return HEAD.size + TOKEN_BYTES * num_tokens + size


def pack_head(name: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the bytes before the contents, with zeros in place of their checksum."""
    return HEAD.pack(MAGIC, bytes(16), name, len(token_ids)) + array("q", token_ids).tobytes()


def file_checksum(whole: memoryview) -> bytes:
    digest: bytes = xxhash.xxh3_128(whole).digest()
    return digest


def unpack_file(packed: memoryview, name: bytes, token_ids: Sequence[int]) -> memoryview | None:
    """Return the contents, or None if anything differs from what is expected. `packed` has the expected size."""
    tokens = array("q", token_ids).tobytes()
    magic, checksum, written_name, count = HEAD.unpack_from(packed)
    if (magic, written_name, count) != (MAGIC, name, len(token_ids)) or checksum != file_checksum(
        packed[CHECKSUM_START:]
    ):
        return None
    if packed[HEAD.size : HEAD.size + len(tokens)] != tokens:
        return None
    return packed[HEAD.size + len(tokens) :]


def read_file(path: Path, size: int) -> memoryview | None:
    """Return a file's bytes; None for another size or no regular file. OSError if it cannot be read."""
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


def write_file(path: Path, pages: bytes | mmap.mmap, size: int) -> None:
    """Write the first `size` bytes of whole pages, for the owner alone whatever the umask. OSError without room."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if size >= DIRECT_IO_BYTES and (direct := getattr(os, "O_DIRECT", 0)):
        # File systems in memory do not support it, and fail when a file is opened or when it is written.
        with suppress(OSError):
            _write(os.open(path, flags | direct, 0o600), memoryview(pages), size)
            return
    _write(os.open(path, flags, 0o600), memoryview(pages)[:size], size)


def _write(file: int, content: memoryview, size: int) -> None:
    """Write all of `content`, cut the file to `size` bytes, and close it."""
    try:
        written = 0
        while written < len(content):
            # A full disk writes a part first, and fails the next time.
            written += os.write(file, content[written:])
        if len(content) > size:
            os.ftruncate(file, size)
    finally:
        os.close(file)
