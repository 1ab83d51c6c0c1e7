"""The JSON parts of a checkpoint: files of its directory, or their equivalents from the metadata of a GGUF file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from ostinato.errors import ModelError
from ostinato.files import is_file
from ostinato.formats.gguf.architectures import config_of
from ostinato.formats.gguf.reader import Header, parts_beside, read_whole
from ostinato.formats.gguf.tokenizer import generation_config_of, tokenizer_config_of, tokenizer_of
from ostinato.json_io import read_json

_READERS = {
    "config.json": config_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
    "generation_config.json": generation_config_of,
}


def is_gguf(checkpoint: Path) -> bool:
    """Return whether `checkpoint` is a GGUF file."""
    return checkpoint.suffix == ".gguf" and is_file(checkpoint)


def read_checkpoint_json(checkpoint: Path, name: str) -> dict[str, Any]:
    """Return the object in the file `name`; empty if the checkpoint has none.

    Raises ModelError if it is damaged, or means something that is not implemented.
    """
    if is_gguf(checkpoint):
        header = gguf_header(checkpoint)
        try:
            return _READERS[name](header) if name in _READERS else {}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(f"{checkpoint} has metadata of other types than its {name} needs: {error}") from None
    return read_json(checkpoint / name)


def gguf_header(path: Path) -> Header:
    """Return the header of a GGUF file, with the tensors of all parts if it is one of several.

    It is read once while the files stay unchanged. Raises ModelError as `read_whole`.
    """
    states = [part.stat() for part in parts_beside(path)]
    return _header(path, tuple((state.st_mtime_ns, state.st_size) for state in states))


@lru_cache(maxsize=2)
def _header(path: Path, _as_they_are: tuple[tuple[int, int], ...]) -> Header:
    return read_whole(path)
