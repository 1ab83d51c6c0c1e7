"""Models that were split into several GGUF files: `NAME-00001-of-00003.gguf` and so on, each with some of the tensors.

The path of any of them names the model. The first has the metadata, the others those of the split alone (llama.cpp,
tools/gguf-split). Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ostinato.errors import ModelError
from ostinato.formats.gguf.header import Header, GgufTensor, read_header

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
    return [part for part in all_parts(path) if part.is_file()]


def read_whole(path: Path) -> Header:
    """Return the header of the model.

    Raises ModelError as `read_header`, and for a part that is missing or belongs elsewhere.
    """
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
    missing = [part.name for part in parts if not part.is_file()]
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
