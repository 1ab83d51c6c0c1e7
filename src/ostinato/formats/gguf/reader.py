"""Reader of the header of a GGUF file, versions 2 and 3: metadata, and tensor places. Imports no torch.

Layout (the specification of the format, github.com/ggml-org/ggml, docs/gguf.md): the magic, a version, the numbers of
tensors and of metadata; the metadata, each a name, a type and a value; the tensors, each a name, its sizes with the
innermost first, its type and its offset from the end of the header, which is padded to `general.alignment`.

Nothing in a file is trusted: every length is compared with the bytes that are left before anything is read or made, so
a damaged file is a ModelError. Tables with more entries than any model has are one, too; lists of strings are kept in
the file's form. So a header takes at most twice its size in memory, besides what `MAX_ENTRIES` and `MAX_TEXT` allow.

A vocabulary has a hundred thousand strings of a few bytes, and each would take 50 bytes and more as an object. In the
file's form, and decoded one by one, they take at most twice their bytes there.

A model may be split into several files, `NAME-00001-of-00003.gguf` and so on. The path of any of them names the model.
The first has the metadata, the others those of the split alone (llama.cpp, tools/gguf-split).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from ostinato.errors import ModelError
from ostinato.files import is_file
from ostinato.json_io import JsonObject
from ostinato.ops.quant.block_formats import BLOCK_FORMATS

LENGTH_BYTES = 8
"""Bytes of the length before each string."""


class LazyStrings(Sequence[str]):
    """Strings in the form of a file, each after its length; `ends` are their ends in `data`."""

    def __init__(self, data: bytes, ends: array[int]) -> None:
        self._data = data
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        return decoded(self._data[(self._ends[number - 1] if number else 0) + LENGTH_BYTES : self._ends[number]])

    def __iter__(self) -> Iterator[str]:
        begin, data = LENGTH_BYTES, self._data
        for end in self._ends:
            yield decoded(data[begin:end])
            begin = end + LENGTH_BYTES

    def find(self, text: str) -> int | None:
        """Return the number of the first string that is `text`, or None, without decoding any."""
        content = text.encode()
        content, at = struct.pack("<Q", len(content)) + content, -1
        while (at := self._data.find(content, at + 1)) >= 0:
            number = bisect_right(self._ends, at)
            if at == (self._ends[number - 1] if number else 0):
                return number
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} texts>"


def decoded(text: bytes) -> str:
    """Decode UTF-8 and keep other bytes readable: some writers store tokens of single bytes so."""
    return text.decode("utf-8", errors="surrogateescape")


@dataclass(frozen=True)
class BlockType:
    """Type of a tensor: a row is a sequence of blocks of `elements` weights in `num_bytes` bytes each."""

    name: str
    elements: int
    num_bytes: int
    is_supported: bool = False
    """True if `blocks.dequantize` knows it."""

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.num_bytes / self.elements


def _supported(name: str) -> BlockType:
    known = BLOCK_FORMATS[name]
    return BlockType(name, known.elements, known.num_bytes, True)


TYPES = {
    0: BlockType("F32", 1, 4, True),
    1: BlockType("F16", 1, 2, True),
    2: _supported("Q4_0"),
    3: _supported("Q4_1"),
    6: _supported("Q5_0"),
    7: _supported("Q5_1"),
    8: _supported("Q8_0"),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: _supported("Q4_K"),
    13: _supported("Q5_K"),
    14: _supported("Q6_K"),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: _supported("IQ4_NL"),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: _supported("IQ4_XS"),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, True),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: _supported("MXFP4"),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""Types by ggml's number. The missing numbers were types that ggml has dropped."""

SUPPORTED = tuple(each.name for each in TYPES.values() if each.is_supported)


LFS_POINTER = b"version https://git-lfs"
LFS_ADVICE = "It is a pointer of Git LFS, which `git lfs pull` replaces by the file."
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**16

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Types of metadata that are one number."""
_STRING, _ARRAY = 8, 9
# Arrays within arrays: no model has any, and a file may not exhaust the stack.
_MAX_NESTING = 4
MAX_ENTRIES = 2**16
"""Most entries of each table, and of arrays within arrays.

An entry of a few bytes takes hundreds as an object. Models have some thousand tensors.
"""
MAX_TEXT = 2**25
"""Most bytes of all names and single strings, which may take four times as much as characters.

Templates have some thousand; a copy of a tokenizer.json, which some writers add, some million.
"""
_MIN_TENSOR_BYTES, _MIN_METADATA_BYTES = 8 + 4 + 4 + 8, 8 + 4 + 1


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    `shape` has the outermost size first, as torch's; `begin` is in bytes from the start of `file`, which may be one of
    those that the model was split into.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    begin: int
    file: Path

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements // self.type.elements * self.type.num_bytes


@dataclass(frozen=True)
class Header:
    """Header of a model.

    `metadata` by name: numbers, strings, truth values, NumPy's arrays of numbers, `LazyStrings`. `tensors` by name, in
    the file's order.
    """

    path: Path
    version: int
    metadata: JsonObject
    tensors: dict[str, GgufTensor]
    mmproj: Header | None = None
    """Header of the encoder's file, whose tensors are among `tensors` too; None if the model takes no images."""
    no_images: str | None = None
    """Reason why a model that could take images takes none."""


def read_header(path: Path) -> Header:
    """Return the header of the file. Raises ModelError if it is not a GGUF file, or is damaged or truncated."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ModelError(f"{path} is empty")  # it could not be mapped
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._num_nested = 0
        self._text_bytes = 0

    def header(self) -> Header:
        if self._data[: len(MAGIC)] != MAGIC:
            also = f". {LFS_ADVICE}" if self._data[: len(LFS_POINTER)] == LFS_POINTER else ""
            raise ModelError(f"{self._path} is no GGUF file: it does not begin with {MAGIC.decode()}{also}")
        self._at = len(MAGIC)
        version = self._number("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            reason = "big-endian" if swapped in VERSIONS else f"version {version}"
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{self._path} is a GGUF file of {reason}; versions {known} in little-endian are read")
        num_tensors, num_metadata = self._number("<Q"), self._number("<Q")
        self._expect(num_metadata * _MIN_METADATA_BYTES + num_tensors * _MIN_TENSOR_BYTES, "tables")
        if max(num_metadata, num_tensors) > MAX_ENTRIES:
            raise self._damaged(f"{num_tensors} tensors and {num_metadata} metadata; of each {MAX_ENTRIES} are read")
        metadata: JsonObject = {}
        for _ in range(num_metadata):
            name = self._string()
            if name in metadata:
                raise self._damaged(f"{name} stands there twice")
            metadata[name] = self._value(self._number("<I"))
        return Header(self._path, version, metadata, self._tensors(num_tensors, self._alignment(metadata)))

    def _alignment(self, metadata: JsonObject) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, which should be a power of two")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        stated = [self._tensor() for _ in range(count)]
        data = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, block, offset in stated:
            place = GgufTensor(name, shape, block, data + offset, self._path)
            if name in found:
                raise self._damaged(f"tensor {name} stands there twice")
            if offset % alignment:
                raise self._damaged(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
            if place.begin + place.num_bytes > self._size:
                raise self._damaged(f"tensor {name} would end at byte {place.begin + place.num_bytes}")
            found[name] = place
        before = data
        for place in sorted(found.values(), key=lambda place: (place.begin, place.num_bytes)):
            if place.begin < before:
                raise self._damaged(f"tensor {place.name} begins within another, at byte {place.begin}")
            before = place.begin + place.num_bytes
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Return the next tensor's (name, shape, type, offset)."""
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions, and {MAX_DIMENSIONS} are the most")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("<I"), self._number("<Q")
        block = TYPES.get(number)
        if block is None:
            known = ", ".join(each.name for each in TYPES.values())
            raise ModelError(f"{self._path}: tensor {name} is of type {number}, which is not known; known are {known}")
        if shape and shape[-1] % block.elements:
            raise self._damaged(
                f"tensor {name} has rows of {shape[-1]}, and {block.name} has blocks of {block.elements}"
            )
        return name, shape, block, offset

    def _value(self, kind: int, nesting: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or nesting == _MAX_NESTING:
            raise self._damaged(f"metadata of type {kind} at byte {self._at}")
        of, count = self._number("<I"), self._number("<Q")
        if of in _SCALARS:
            begin = self._skip(count * struct.calcsize(_SCALARS[of]))
            import numpy as np  # imported late: a third of a plan's imports, needed only for such files

            return np.frombuffer(self._data, _SCALARS[of], count, begin).copy()
        self._expect(8 * count, "an array")  # a string has at least its length
        if of == _STRING:
            return self._texts(count)
        self._num_nested += count
        if self._num_nested > MAX_ENTRIES:
            raise self._damaged(f"{count} arrays within an array at byte {self._at}; {MAX_ENTRIES} are read")
        return [self._value(of, nesting + 1) for _ in range(count)]

    def _texts(self, count: int) -> LazyStrings:
        """Read a list of strings. The loop is written out, since vocabularies have a hundred thousand."""
        data, size, first, at = self._data, self._size, self._at, self._at
        length_at = struct.Struct("<Q").unpack_from
        ends = array("Q", bytes(8 * count))
        for number in range(count):
            begin = at + LENGTH_BYTES
            if begin > size or length_at(data, at)[0] > size - begin:
                raise self._damaged(f"a string at byte {at}")
            at = begin + length_at(data, at)[0]
            ends[number] = at - first
        self._at = at
        return LazyStrings(data[first:at], ends)

    def _string(self) -> str:
        length = self._number("<Q")
        begin = self._at - LENGTH_BYTES
        if length > self._size - self._at:
            raise self._damaged(f"a string at byte {begin}")
        self._text_bytes += length
        if self._text_bytes > MAX_TEXT:
            raise self._damaged(f"names and texts of more than {MAX_TEXT} bytes, up to byte {begin}")
        self._at += length
        return decoded(self._data[begin + LENGTH_BYTES : self._at])

    def _number(self, form: str) -> Any:
        begin = self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, begin)[0]

    def _skip(self, count: int) -> int:
        """Skip `count` bytes; return where they begin."""
        begin = self._at
        self._expect(count, "a value")
        self._at = begin + count
        return begin

    def _expect(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            raise self._damaged(f"{what} of {count} bytes at byte {self._at}")

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path} of {self._size} bytes is damaged or truncated: {what}. Download it again.")


COUNT, TENSORS = "split.count", "split.tensors.count"
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def all_parts(path: Path) -> list[Path]:
    """Return all files of the model that `path` is a part of, as its name says; else `path` alone."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    return [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, count + 1)]


def parts_beside(path: Path) -> list[Path]:
    """Return those of `all_parts` that exist."""
    return [part for part in all_parts(path) if is_file(part)]


def read_whole(path: Path) -> Header:
    """Return the model's header. ModelError as `read_header`, and for a part that is missing or belongs elsewhere."""
    own = read_header(path)
    count = own.metadata.get(COUNT, 1)
    if type(count) is not int or count < 2:
        return own
    parts = all_parts(path)
    if len(parts) != count:
        named = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name)
        raise ModelError(
            f"{path} is one of {count} files of a model; their names should be {named}-00001-of-{count:05}.gguf to "
            f"{named}-{count:05}-of-{count:05}.gguf"
        )
    missing = [part.name for part in parts if not is_file(part)]
    if missing:
        raise ModelError(f"{path} is one of {count} files of a model; {', '.join(missing)} should lie beside it")
    headers = [own if part == path else read_header(part) for part in parts]
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        twice = sorted(tensors.keys() & header.tensors.keys())
        if header.metadata.get(COUNT) != count or twice:
            reason = f"it has tensor {twice[0]} of another part" if twice else f"its {COUNT} is not {count}"
            raise ModelError(f"{header.path} is no part of the same model as {path}: {reason}")
        tensors |= header.tensors
    expected = headers[0].metadata.get(TENSORS, len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{path}: the model has {expected} tensors, and its {count} files have {len(tensors)}")
    return replace(headers[0], path=path, tensors=tensors)
