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
"""With the version of what follows it."""
HEAD = struct.Struct("<8s16s16sI")
"""Magic; xxh3 of all behind it; the name; how many tokens stand before the contents."""
NAME_BYTES = 16
TOKEN_BYTES = 8
CHECKED_FROM = len(MAGIC) + 16
DIRECT_FROM = 2**18
"""Bytes of a file from which on it is written past the page cache. Putting it there would take many times the
processor's time, which the model needs; waiting for the disk takes none."""


def packed_bytes(num_tokens: int, size: int) -> int:
    """Of a file with contents of `size` bytes."""
    return HEAD.size + TOKEN_BYTES * num_tokens + size


def head_of(name: bytes, token_ids: Sequence[int]) -> bytes:
    """What stands before the contents, with zeros where their checksum will stand."""
    return HEAD.pack(MAGIC, bytes(16), name, len(token_ids)) + array("q", token_ids).tobytes()


def checksum_of(whole: memoryview) -> bytes:
    digest: bytes = xxhash.xxh3_128(whole).digest()
    return digest


def unpack(packed: memoryview, name: bytes, token_ids: Sequence[int]) -> memoryview | None:
    """The contents, if nothing about them is other than expected. `packed` has the size that it should have."""
    tokens = array("q", token_ids).tobytes()
    magic, checksum, of, count = HEAD.unpack_from(packed)
    if (magic, of, count) != (MAGIC, name, len(token_ids)) or checksum != checksum_of(packed[CHECKED_FROM:]):
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


def write_file(path: Path, pages: bytes | mmap.mmap, size: int) -> None:
    """The first `size` bytes of these whole pages, for the owner alone, whatever the umask says. OSError if there is no
    room."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if size >= DIRECT_FROM and (direct := getattr(os, "O_DIRECT", 0)):
        # A system of files in memory has no such way, and says so when a file is opened or when it is written.
        with suppress(OSError):
            _write(os.open(path, flags | direct, 0o600), memoryview(pages), size)
            return
    _write(os.open(path, flags, 0o600), memoryview(pages)[:size], size)


def _write(file: int, given: memoryview, size: int) -> None:
    """All that is given, of which `size` bytes stay. Closes the file."""
    try:
        written = 0
        while written < len(given):
            # A disk that is full takes a part of it, and nothing the next time.
            written += os.write(file, given[written:])
        if len(given) > size:
            os.ftruncate(file, size)
    finally:
        os.close(file)
