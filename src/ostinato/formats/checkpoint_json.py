"""The JSON parts of a checkpoint: files of its directory, or their equivalents from the metadata of a GGUF file."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from ostinato.errors import ModelError
from ostinato.files import is_file, matches
from ostinato.formats.gguf.architectures import config_of
from ostinato.formats.gguf.mmproj import PATTERN, processor_of, video_processor_of, with_encoder, with_images
from ostinato.formats.gguf.reader import Header, parts_beside, read_whole
from ostinato.formats.gguf.tokenizer import generation_config_of, tokenizer_config_of, tokenizer_of
from ostinato.json_io import JsonObject, read_json

_READERS = {
    "config.json": lambda header: with_images(config_of(header), header),
    "preprocessor_config.json": processor_of,
    "video_preprocessor_config.json": video_processor_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
    "generation_config.json": generation_config_of,
}


def is_gguf(checkpoint: Path) -> bool:
    """Return whether `checkpoint` is a GGUF file."""
    return checkpoint.suffix == ".gguf" and is_file(checkpoint)


def read_checkpoint_json(checkpoint: Path, name: str) -> JsonObject:
    """Return the object in the file `name`, or an empty one. ModelError if it is damaged or not implemented."""
    if is_gguf(checkpoint):
        header = gguf_header(checkpoint)
        try:
            return _READERS[name](header) if name in _READERS else {}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(f"{checkpoint} has metadata of other types than its {name} needs: {error}") from None
    return read_json(checkpoint / name)


def folder_advice(directory: Path) -> str:
    """Return what a folder holds that is no checkpoint, or lacks its weights, and what to give in its place."""
    adapter = read_json(directory / "adapter_config.json")
    if adapter:
        base = adapter.get("base_model_name_or_path") or "another model"
        return f"it is an adapter of {base}, and adapters are not supported: merge it into that model, and give that"
    files = [path.name for path in matches(directory, "*")]
    if ggufs := [name for name in files if name.endswith(".gguf")]:
        return f"give one of its GGUF files: {', '.join(ggufs)}"
    folders = [*matches(directory, "*"), *matches(directory / "snapshots", "*")]
    if inner := [folder / "config.json" for folder in folders if is_file(folder / "config.json")]:
        return f"give the folder in it that has one: {', '.join(str(path.parent) for path in inner[:4])}"
    endings = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", "onnx")
    if others := [name for name in files if name.endswith(endings)]:
        return f"it has {', '.join(others[:3])}, and only safetensors beside a config.json, and GGUF files, are read"
    return "give the directory of one, a GGUF file, or a hub id (OWNER/NAME)" + (
        "" if files or not os.access(directory, os.R_OK) else "; it is empty"
    )


def gguf_header(path: Path) -> Header:
    """Return the header of a GGUF file, with the tensors of all its parts, and of the encoder's file beside it.

    It is read once while the files stay unchanged. Raises ModelError as `read_whole` and `with_encoder`.
    """
    encoders = tuple(other for other in matches(path.parent, PATTERN) if other != path)
    states = [part.stat() for part in (*parts_beside(path), *filter(is_file, encoders))]
    return _header(path, encoders, tuple((state.st_mtime_ns, state.st_size) for state in states))


@lru_cache(maxsize=2)
def _header(path: Path, encoders: tuple[Path, ...], _as_they_are: tuple[tuple[int, int], ...]) -> Header:
    return with_encoder(read_whole(path), encoders)
