"""Weights from safetensors files into a model, with one error for everything that does not match."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ostinato.errors import ModelError
from ostinato.layers import pages
from ostinato.layers.build import checkpoint_views
from ostinato.models.base import CausalLM

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

PIECE = 2**23
"""bytes that are copied from a mapped file before their pages are dropped"""


def load_weights(
    model: CausalLM, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Puts every tensor of the checkpoint in its place, in the model's dtypes.

    On a CPU the memory taken at any time is that of the weights and a few MiB. The files must not be changed
    while the model is in use, for weights may lie in them; they may be deleted or replaced.
    `progress` is called with (tensors done, tensors in all). Raises ModelError, before anything is read, that
    lists all tensors missing, left over or of the wrong shape.
    """
    places = dict(checkpoint_views(model))
    files = checkpoint_files(directory)
    sources, unexpected, misshapen = _match(model, files, places)
    missing = sorted(places.keys() - sources.keys())
    if missing or unexpected or misshapen:
        raise ModelError(_mismatch(directory, missing, unexpected, misshapen))
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    done = 0
    for file in files:
        with _opened(file) as tensors:
            pages.read_ahead(file)
            for name, (source, source_name) in sources.items():
                if source != file:
                    continue
                place = places[name]
                _put(tensors.get_tensor(source_name), place, parameters.get(place.data_ptr()))
                done += 1
                progress(done, len(sources))


def _put(tensor: torch.Tensor, place: torch.Tensor, parameter: nn.Parameter | None) -> None:
    """Puts a tensor of a mapped file in its place, `parameter` being the weight that begins there.

    It stays where it is mapped if it is the whole weight as it stands. Else it is copied, piece by piece: a file
    of which all was read once would take as much memory as the weights.
    """
    if parameter is not None and _serves_as(tensor, place, parameter):
        parameter.data = tensor
        return
    if tensor.nbytes <= PIECE:
        pieces = [(tensor, place)]
    else:
        rows = max(1, PIECE * len(tensor) // tensor.nbytes)
        pieces = list(zip(tensor.split(rows), place.split(rows), strict=True))
    for source, target in pieces:
        target.copy_(source)
        pages.drop(source)


def _serves_as(tensor: torch.Tensor, place: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether a mapped tensor can be the weight itself. Most files place tensors anywhere, and decoding reads all
    weights in every step: across cache lines that takes 5 to 10 % longer, which one copy saves for good. Small pages
    cost 1 to 2 %."""
    return (
        place.device.type == "cpu"
        and tensor.dtype == place.dtype
        and (place.shape, place.stride()) == (parameter.shape, parameter.stride())
        and tensor.data_ptr() % pages.CACHE_LINE == 0
    )


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index if it is sharded."""
    if (directory / INDEX).exists():
        names = _indexed_files(directory / INDEX)
        absent = [name for name in names if not (directory / name).exists()]
        if absent:
            raise ModelError(f"{directory} lacks weight files named in {INDEX}: {', '.join(absent)}. Download them.")
        return [directory / name for name in names]
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    raise ModelError(
        f"{directory} holds no weights: neither {SINGLE} nor {INDEX}. "
        "Only safetensors checkpoints are read; `ostinato plan` and `--random-weights` need none."
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file's name is not a string")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error}. Download the checkpoint again.") from error
    return sorted(names)


def _match(
    model: CausalLM, files: list[Path], places: dict[str, torch.Tensor]
) -> tuple[dict[str, tuple[Path, str]], list[str], list[str]]:
    """Which file and name each place is read from; tensors without a place; tensors of another shape."""
    sources: dict[str, tuple[Path, str]] = {}
    unexpected, misshapen = [], []
    for file in files:
        with _opened(file) as tensors:
            for source_name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                name = model.checkpoint_name(source_name)
                if name is None:
                    continue
                if name not in places:
                    unexpected.append(source_name)
                    continue
                found, expected = tuple(tensors.get_slice(source_name).get_shape()), tuple(places[name].shape)
                if found != expected:
                    misshapen.append(f"{source_name} is {list(found)}, expected {list(expected)}")
                sources[name] = (file, source_name)
    return sources, sorted(unexpected), misshapen


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}. It may be truncated; download it again.") from error


def _mismatch(directory: Path, missing: list[str], unexpected: list[str], misshapen: list[str]) -> str:
    parts = [f"The weights in {directory} do not match its config.json."]
    for title, names in (("missing", missing), ("left over", unexpected), ("wrong shape", misshapen)):
        if names:
            parts.append(f"{title} ({len(names)}): {', '.join(names)}.")
    return "\n".join(parts)
