"""Safetensors files, found, mapped and checked; and checks that a mapped file keeps its contents while in use.

A process that reads a file that has become shorter gets SIGBUS; the message for that is made here too.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ostinato.errors import ModelError, os_error_text
from ostinato.files import exists, find_in_checkpoint, is_directory, matches
from ostinato.formats.checkpoint_json import folder_advice
from ostinato.formats.gguf.reader import LFS_ADVICE, LFS_POINTER, all_parts
from ostinato.json_io import read_json
from ostinato.ops.arrays import numpy_dtype

ADVICE = "replace files of models by others of the same name (mv), and never write into them"


def truncated_file_message(models: str) -> str:
    """Return the message for a SIGBUS: a file of `models` (one or several) was shortened while it was mapped."""
    return (
        f"a file of model {models} could not be read: it was shortened while it was in use, or its disk fails. Compare "
        f"its size with that at its source, or download it again; {ADVICE}"
    )


_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""Dtypes by their names in safetensors."""


_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python does not name: what is mapped counts as no memory that may be written."""


def _map(file: int) -> mmap.mmap:
    """Map a file, so that writes stay in this process; there are none."""
    if sys.platform != "linux":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


class SafetensorsFile:
    """A safetensors file, mapped. Its tensors are views that keep it mapped; writes to them stay in this process."""

    def __init__(self, path: Path) -> None:
        """Map `path`.

        ModelError if it cannot be read, if its header does not describe all of it, or if it has two tensors of one
        name.
        """
        self.path = path
        try:
            with safe_open(path, framework="numpy"), path.open("rb") as file:  # The library checks the header.
                size = int.from_bytes(file.read(8), "little")
                tensors = json.loads(file.read(size), object_pairs_hook=list)
                mapped = _map(file.fileno())
        except (SafetensorError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise
            try:
                with path.open("rb") as data:
                    is_pointer = LFS_POINTER in data.read(len(LFS_POINTER))
            except OSError as unreadable:  # which the library calls a file that is not there
                raise ModelError(f"{path} cannot be read: {os_error_text(unreadable)}") from None
            advice = LFS_ADVICE if is_pointer else "It may be truncated; download it again."
            raise ModelError(f"{path} cannot be read: {error}. {advice}") from error
        names = [name for name, _ in tensors]
        if len(names) > len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelError(f"{path} has two tensors named {twice}; download it again.")
        self._tensors = {name: dict(facts) for name, facts in tensors if name != "__metadata__"}
        self._data = np.frombuffer(mapped, np.uint8)[8 + size :]

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def dtype(self, name: str) -> str:
        """Return the name that safetensors has for a tensor's dtype."""
        return str(self._tensors[name]["dtype"])

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name]["shape"])

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor of the mapped file."""
        first, end = self._tensors[name]["data_offsets"]
        kind = _DTYPES.get(self.dtype(name))
        if kind is None:
            raise ModelError(f"{name} in {self.path} is of dtype {self.dtype(name)}, which is not read")
        return self._data[first:end].view(numpy_dtype(kind)).reshape(self.shape(name))


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, by its index if it has several."""
    if find_in_checkpoint(directory, INDEX) is not None:
        names = _indexed_files(directory / INDEX)
        absent = [name for name in names if find_in_checkpoint(directory, name, may_leave=True) is None]
        if absent:
            raise ModelError(f"{directory} lacks weight files named in {INDEX}: {', '.join(absent)}. Download them.")
        return [directory / name for name in names]
    if find_in_checkpoint(directory, SINGLE, may_leave=True) is not None:
        return [directory / SINGLE]
    raise ModelError(
        f"{directory} holds no weights: neither {SINGLE} nor {INDEX}; {folder_advice(directory)}. "
        "`ostinato plan` and `--random-weights` need none."
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        names = set(read_json(index)["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file's name is not a string")
    except (ModelError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error}. Download the checkpoint again.") from error
    return sorted(names)


MAPS = Path("/proc/self/maps")
"""File in which Linux lists what a process has mapped. On other systems no write is noticed."""


class MappedFileWatch:
    """Checkpoint files that this process has mapped, watched for changes.

    They are files of directories or GGUF files. A file that was deleted or replaced stays unchanged for processes that
    map it; one that is written to changes under them.
    """

    def __init__(self, checkpoints: Iterable[Path]) -> None:
        mapped = set(_mapped())
        files = {file.resolve() for checkpoint in checkpoints for file in _files(checkpoint)}
        self._seen = {file: file.stat() for file in files if str(file) in mapped}

    def check(self) -> None:
        """Raise ModelError if a file was written to since."""
        for file, before in self._seen.items():
            try:
                now = file.stat()
            except OSError:
                continue
            written = (now.st_mtime_ns, now.st_size) != (before.st_mtime_ns, before.st_size)
            if os.path.samestat(before, now) and written:
                raise ModelError(
                    f"{file} was written to while it was in use: weights lie in it, and what follows would mean "
                    f"nothing. Start again; {ADVICE}"
                )


def _files(checkpoint: Path) -> Iterable[Path]:
    return matches(checkpoint, "*.safetensors") if is_directory(checkpoint) else all_parts(checkpoint)


def _mapped() -> Iterator[str]:
    if exists(MAPS):
        for line in MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5]
