"""The tensors of a checkpoint, from the headers of its files alone. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import ModelError
from ostinato.formats.parts import gguf_header, is_gguf

_MAX_HEADER = 2**28
"""Bytes; a header that says to be longer is damaged."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint. `type` is a type of blocks in GGUF files, of numbers in others."""

    name: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def stored_tensors(checkpoint: Path) -> list[Stored]:
    """Return the tensors of a GGUF file, or of all safetensors files of a directory.

    Raises ModelError for a file that is damaged.
    """
    if is_gguf(checkpoint):
        places = gguf_header(checkpoint).tensors.values()
        return [Stored(place.name, place.type.name, place.shape, place.num_bytes) for place in places]
    return [tensor for file in sorted(checkpoint.glob("*.safetensors")) for tensor in _safetensors(file)]


def _safetensors(file: Path) -> Iterator[Stored]:
    """Yield the tensors of a safetensors file (github.com/huggingface/safetensors).

    The format is 8 bytes of length, then JSON of that length.
    """
    try:
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if length > min(_MAX_HEADER, file.stat().st_size):
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(data.read(length))
        for name, entry in entries.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield Stored(name, entry["dtype"], tuple(map(int, entry["shape"])), int(end) - int(begin))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read: {error}. It may be truncated; download it again.") from None
