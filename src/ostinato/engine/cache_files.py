"""Files of an engine's prefix cache: opened by the plan, and listed for `ostinato cache`.

An engine's identity is the set of properties that two engines must share to exchange requests and files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ostinato._version import __version__
from ostinato.errors import ModelError
from ostinato.files import expand, is_directory, is_file, matches
from ostinato.formats.checkpoint_json import gguf_header, is_gguf
from ostinato.formats.gguf.reader import all_parts
from ostinato.json_io import JsonObject, parse_json
from ostinato.kv_cache.offload.directory import ABOUT_FILE, FILE_KINDS, PARTIAL_SUFFIX, CacheDirectory
from ostinato.kv_cache.offload.file_format import NAME_BYTES
from ostinato.kv_cache.offload.file_tier import FileRates, FileTier
from ostinato.kv_cache.request_cache import CacheMemory
from ostinato.plan.cache_files import MAX_WAITING, CacheFilesPlan
from ostinato.plan.device.measured_rates import cache_directory
from ostinato.plan.plan import Plan

HEAD_BYTES = 2**20
"""Bytes hashed at the start of a weights file, which holds the tensor names."""
NUM_PIECES, PIECE_BYTES = 256, 4096
"""Number and bytes of further pieces that are hashed, equally far apart.

Two models may differ in their middle alone, and archives, images of containers and some systems give all files one
time.
"""


def open_files(
    plan: CacheFilesPlan, identity: Mapping[str, object], model: str, weights: Sequence[Path], memory: CacheMemory
) -> FileTier:
    """Return the cache files of a model with these `weights`, directories or files, in the layout of this `identity`.

    ConfigError if the directory cannot be written to.
    """
    about = {**identity, "weights": [each for path in weights for each in weights_identity(path)]}
    root = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=NAME_BYTES).digest()
    folder = default_cache_directory() if plan.directory is None else expand(plan.directory)
    folder = folder.absolute() / root.hex()
    note = json.dumps({"model": model, **about}, indent=1).encode()
    directory = CacheDirectory(folder, plan.limit, MAX_WAITING, about=note)
    return FileTier(directory, memory, root, FileRates(plan.bytes_per_second, plan.flops_per_second))


def default_cache_directory() -> Path:
    """Return the directory of this user's cache files."""
    return cache_directory() / "prefixes"


def weights_identity(path: Path) -> list[list[object]]:
    """Return what identifies a checkpoint's files: name, modification time, size and a digest.

    The digest covers their start and pieces spread over them. Only all bytes would be certain; reading those takes as
    long as loading.
    """
    return [[file.name, file.stat().st_mtime_ns, *file_fingerprint(file)] for file in checkpoint_files(path)]


def checkpoint_digest(path: Path) -> str:
    """Return 64 hex digits that identify a checkpoint's files, wherever they lie and whenever they were written.

    Like `weights_identity`, they cover parts of each file. Without files they are those of the empty text, and those of
    the checkpoint's name if a file has gone.
    """
    try:
        about: list[object] = [[file.name, *file_fingerprint(file)] for file in checkpoint_files(path)]
    except (OSError, ModelError):
        about = [path.name]
    return hashlib.sha256(json.dumps(about).encode() if about else b"").hexdigest()


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files that decide what a checkpoint, a directory or a file, computes."""
    if not is_directory(path):
        encoder = gguf_header(path).mmproj if is_gguf(path) else None
        return [*all_parts(path), *([] if encoder is None else [encoder.path])]
    found = sorted([*matches(path, "*.safetensors"), *matches(path, "*.json")])
    return [file for file in found if is_file(file) and os.access(file, os.R_OK)]


def file_fingerprint(file: Path) -> tuple[int, str]:
    """Return the size of a file, and a digest of its start and of pieces spread over it."""
    size = file.stat().st_size
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    with file.open("rb") as opened:
        digest.update(opened.read(HEAD_BYTES))
        for number in range(1, NUM_PIECES + 1) if size > HEAD_BYTES else ():
            opened.seek((size - PIECE_BYTES) * number // NUM_PIECES)
            digest.update(opened.read(PIECE_BYTES))
    return size, digest.hexdigest()


@dataclass(frozen=True)
class CacheFolder:
    """One model's folder in a directory of caches.

    `used` is when a file was last used, in seconds since 1970; 0 without files.
    """

    path: Path
    model: str
    dtype: str
    files: int
    num_bytes: int
    used: float


def list_cache_folders(directory: Path) -> list[CacheFolder]:
    """Return the folders of all models in a directory, by name, and skip the rest. OSError if it cannot be read."""
    found = []
    for path in sorted(each for each in directory.iterdir() if is_directory(each) and _is_name(each.name)):
        stats = []
        for file in _files_in(path):
            with suppress(FileNotFoundError):  # an engine that runs has just removed it
                stats.append(file.stat())
        try:
            about = parse_json((path / ABOUT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            about = {}
        about = about if isinstance(about, dict) else {}
        used = max((each.st_mtime for each in stats), default=0.0)
        model, dtype = str(about.get("model", "unknown")), str(about.get("dtype", "unknown"))
        found.append(CacheFolder(path, model, dtype, len(stats), sum(each.st_size for each in stats), used))
    return found


def clear_cache_folder(folder: CacheFolder) -> None:
    """Remove the files of one model, and nothing else. OSError if a file cannot be removed."""
    for file in [*_files_in(folder.path), folder.path / ABOUT_FILE, *matches(folder.path, f"*{PARTIAL_SUFFIX}")]:
        file.unlink(missing_ok=True)
    try:
        folder.path.rmdir()
    except OSError:  # it holds other files too
        return


def _files_in(path: Path) -> Iterator[Path]:
    for kind in FILE_KINDS:
        yield from matches(path, f"*.{kind}")


def _is_name(name: str) -> bool:
    return len(name) == 2 * NAME_BYTES and all(each in "0123456789abcdef" for each in name)


def engine_identity(plan: Plan, weights: Sequence[Path]) -> JsonObject:
    """Return the identity of an engine with these `weights`, directories or files.

    Copies of them on two machines are equal: their contents count, not when they were written.
    """
    return {
        **cache_fingerprint(plan),
        "max_model_len": plan.settings.max_model_len,
        "weights": [[file.name, *file_fingerprint(file)] for path in weights for file in checkpoint_files(path)],
    }


CACHE_FORMAT_VERSION = 1
"""Version of the meaning of the bytes. It changes with a layer's arrays or their order."""


def cache_fingerprint(plan: Plan) -> JsonObject:
    """Return a plan's part of the identity, besides the weights, as plain data for `json.dumps`."""
    settings, memory = plan.settings, plan.memory
    return {
        "layout": CACHE_FORMAT_VERSION,
        "version": __version__,
        "dtype": settings.dtype,
        "ssm_state_dtype": settings.ssm_state_dtype,
        "ssm_state_rounding": settings.ssm_state_rounding,
        "ssm_checkpoint_dtype": settings.ssm_checkpoint_dtype,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "quantization": f"{settings.quantization}{', int8 activations' if settings.activation_dtype == 'int8' else ''}",
        "block_size": settings.block_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "block_bytes": memory.kv_block,
        "pane_bytes": memory.window_block,
        "pane_window": memory.sliding_window,
        "slot_bytes": memory.state_slot,
        "rope": str(settings.ropes[0].rope if settings.ropes else None),  # others stand in the weights' identity
        "max_model_len": settings.max_model_len if settings.ropes else None,
        "speculative": str(settings.speculative),
        "random_weights": settings.seed if settings.random_weights else None,
        "deterministic": settings.deterministic,
        "kernels": sorted({f"{name} {choice.implementation}" for name, choice in plan.kernels.items()}),
        "instructions": plan.device.native.isa,
    }
