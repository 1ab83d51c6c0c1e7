"""Weights from a GGUF file into a model: blocks as they lie, or expanded, or quantised anew, as the plan says."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import torch

from ostinato.errors import ModelError
from ostinato.formats.gguf.blocks import dequantize
from ostinato.formats.gguf.header import Header, TensorPlace
from ostinato.formats.gguf.names import checkpoint_name, pairs_neighbours
from ostinato.formats.gguf.types import SUPPORTED
from ostinato.formats.parts import gguf_header
from ostinato.layers import pages
from ostinato.layers.build import BlockView, Target, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.sources import Mismatch
from ostinato.ops.blocks.quantizers import BY_TORCH, Quantizers

PIECE = 2**21
"""Weights that are expanded at once."""


def load_gguf(
    model: CausalLM, path: Path, progress: Callable[[int, int], None], quantizers: Quantizers = BY_TORCH
) -> None:
    """Puts every tensor of the file in its place. ModelError, before anything is read, that lists all tensors missing,
    left over or of the wrong shape, or those of types that are not supported."""
    header, places = gguf_header(path), dict(checkpoint_views(model))
    tensors = _match(model, header, places)
    architecture = header.metadata["general.architecture"]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        for done, (name, tensor) in enumerate(tensors.items(), start=1):
            heads = _heads(model, name) if pairs_neighbours(architecture, tensor.name) else None
            _put(_rows(data, tensor), tensor, places[name], heads, quantizers)
            progress(done, len(tensors))


def _match(model: CausalLM, header: Header, places: dict[str, Target]) -> dict[str, TensorPlace]:
    """The tensor of each place."""
    unknown = {each.type.name for each in header.tensors.values() if not each.type.is_supported}
    if unknown:
        known = ", ".join(SUPPORTED)
        raise ModelError(f"{header.path} has tensors of type {', '.join(sorted(unknown))}; supported: {known}")
    found: dict[str, TensorPlace] = {}
    unexpected, misshapen = [], []
    for tensor in header.tensors.values():
        name = checkpoint_name(tensor.name)
        place_name = None if name is None else model.checkpoint_name(name)
        if place_name is None or place_name not in places:
            unexpected.append(tensor.name)
        elif tensor.shape != tuple(places[place_name].shape):
            expected = list(places[place_name].shape)
            misshapen.append(f"{tensor.name} is {list(tensor.shape)}, expected {expected}")
        else:
            found[place_name] = tensor
    missing = sorted(name for name in places if name not in found)
    mismatch = Mismatch(missing, sorted(unexpected), misshapen)
    if missing or unexpected or misshapen:
        raise ModelError(mismatch.message(header.path))
    return found


def _heads(model: CausalLM, name: str) -> int:
    """Heads of the queries or keys that a tensor makes."""
    attention = model.spec.layers[0].attention
    assert attention is not None, "a model with queries has attention"
    return attention.num_heads if ".q_proj." in name else attention.num_kv_heads


def _rows(data: mmap.mmap, tensor: TensorPlace) -> torch.Tensor:
    """[rows, bytes] uint8, where the file is mapped; a vector is one row."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return torch.frombuffer(data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.begin).view(rows, -1)


def _put(rows: torch.Tensor, tensor: TensorPlace, place: Target, heads: int | None, quantizers: Quantizers) -> None:
    """Copies or expands rows piece by piece into their place. `heads`: whose rows are put in the order of
    checkpoints."""
    if len(tensor.shape) < 2:
        assert isinstance(place, torch.Tensor), "vectors are not quantised"
        values = dequantize(tensor.type, rows)[0]
        place.copy_(values if heads is None else _half_apart(values[:, None], heads)[:, 0])
        return
    of_head = 1 if heads is None else len(rows) // heads
    step = max(1, PIECE // tensor.shape[-1] // of_head) * of_head
    for begin in range(0, len(rows), step):
        if isinstance(place, BlockView) and place.name == tensor.type.name:
            lying = rows[begin : begin + step]
            place.bytes[begin : begin + step] = lying if heads is None else _half_apart(lying, len(lying) // of_head)
            pages.drop(lying)
            continue
        values = dequantize(tensor.type, rows[begin : begin + step])
        if heads is not None:
            values = _half_apart(values, len(values) // of_head)
        if isinstance(place, torch.Tensor):
            place[begin : begin + step].copy_(values)
        else:
            place.rows(begin, begin + step).put(values, quantizers)


def _half_apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * size, in], in each head pairs of neighbours -> the first of each pair, then the second ones."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
