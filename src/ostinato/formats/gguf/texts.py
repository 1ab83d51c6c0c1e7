"""A list of strings in a GGUF file's metadata, decoded one by one when asked for. Imports no torch.

A vocabulary has a hundred thousand strings of a few bytes, and each would take 50 bytes and more as an object. Kept in
this form, they take at most twice their bytes in the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} texts>"


def decoded(text: bytes) -> str:
    """Decode UTF-8 and keep other bytes readable: some writers store tokens of single bytes so."""
    return text.decode("utf-8", errors="surrogateescape")
