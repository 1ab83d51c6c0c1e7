"""Loading of weights from a GGUF file into a model, in the form that the plan chose.

Blocks stay in the mapped file or are copied; others are dequantized, or quantised anew.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ostinato.formats.gguf.blocks import dequantize
from ostinato.formats.gguf.header import GgufTensor
from ostinato.formats.gguf.names import GATE, is_changed, stores_norm_plus_one, has_adjacent_rope
from ostinato.formats.gguf.transforms import to_half_split, to_checkpoint_layout
from ostinato.formats.parts import gguf_header
from ostinato.layers import pages
from ostinato.layers.build import BlockView, WeightTarget, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.gguf_places import GgufTarget, num_heads_of, tensors_of_places
from ostinato.models.shares import TensorShard, tensor_shards
from ostinato.ops.blocks.quantizers import BY_TORCH, WeightQuantizers

PIECE = 2**21
"""Weights that are dequantized at once."""


def load_gguf(
    model: CausalLM, path: Path, progress: Callable[[int, int], None], quantizers: WeightQuantizers = BY_TORCH
) -> None:
    """Load every tensor of the file, and of the files that it was split into, into its target.

    ModelError, before anything is read, as `tensors_of_places`.
    """
    header = gguf_header(path)
    tensors, places, shares = tensors_of_places(model, header, dict(checkpoint_views(model)), tensor_shards(model))
    files = {file: _mapped(file) for file in {tensor.file for tensor in tensors.values()}}
    _map_matrices(model, tensors, files, shares)
    for done, (name, tensor) in enumerate(tensors.items(), start=1):
        rows, place, share = _rows(files[tensor.file], tensor), places[name], shares.get(name)
        if _is_mapped(place):
            pages.populate_pages(rows if share is None else share.read(rows))
            progress(done, len(tensors))
            continue
        if isinstance(place, list):
            for of_expert, matrix in zip(rows.chunk(len(place)), place, strict=True):
                _put(of_expert, tensor, matrix, None, quantizers, share)
        elif is_changed(tensor.name):
            assert isinstance(place, torch.Tensor), "what belongs to heads is not quantised"
            values = to_checkpoint_layout(tensor.name, dequantize(tensor.type, rows))
            place.copy_(values if share is None else share.read(values))
        elif stores_norm_plus_one(model.spec.architecture, tensor.name):
            assert isinstance(place, torch.Tensor), "norms are not quantised"
            place.copy_(dequantize(tensor.type, rows)[0] - 1)
        else:
            heads = num_heads_of(model, name) if has_adjacent_rope(model.spec.architecture, tensor.name) else None
            _put(rows, tensor, place, heads, quantizers, share)
        pages.drop(rows)
        progress(done, len(tensors))


def _map_matrices(
    model: CausalLM,
    tensors: Mapping[str, GgufTensor],
    files: Mapping[Path, mmap.mmap],
    shares: Mapping[str, TensorShard],
) -> None:
    """Point the weights that the plan left without memory at their mapped tensors.

    The file stays mapped while they are used. With a sharded tensor, a weight gets its rank's rows.
    """
    for module, attribute, row in model.weights():
        weight: torch.Tensor = getattr(module, attribute)
        if weight.is_meta:
            first = tensors.get(row.names[0]) or tensors[row.names[0] + GATE]
            share, begin = shares.get(row.names[0]), first.begin
            if share is not None:
                ((first_row, _),) = share.parts
                begin += first_row * (first.num_bytes // share.shape[0])
            mapped = _bytes(files[first.file], begin, weight.numel())
            setattr(module, attribute, mapped.view(weight.shape))


def _is_mapped(place: GgufTarget) -> bool:
    return isinstance(place, BlockView) and place.bytes.is_meta


def _mapped(path: Path) -> mmap.mmap:
    """Map the file; it stays mapped while a tensor uses it. Writes to it stay in this process."""
    pages.read_ahead(path)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _bytes(data: mmap.mmap, begin: int, count: int) -> torch.Tensor:
    """Return [count] uint8 of the mapped file, without a copy; the tensor keeps it mapped."""
    return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=begin)


def _rows(data: mmap.mmap, tensor: GgufTensor) -> torch.Tensor:
    """Return a tensor's rows in the mapped file, [rows, bytes] uint8.

    A vector is one row; the rows of experts are concatenated.
    """
    rows = tensor.num_elements // tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return _bytes(data, tensor.begin, tensor.num_bytes).view(rows, -1)


def _put(
    rows: torch.Tensor,
    tensor: GgufTensor,
    place: WeightTarget,
    heads: int | None,
    quantizers: WeightQuantizers,
    share: TensorShard | None,
) -> None:
    """Copy or dequantize rows piece by piece into their target, or only the part of `share`.

    With `heads`, the rows of each head are put in the order of checkpoints.
    """
    if len(tensor.shape) < 2:
        assert isinstance(place, torch.Tensor), "vectors are not quantised"
        values = dequantize(tensor.type, rows)[0]
        values = values if share is None else share.read(values)
        place.copy_(values if heads is None else to_half_split(values[:, None], heads)[:, 0])
        return
    if share is not None and not share.cuts_rows:
        rows, share = share.read(rows), None
    stays = isinstance(place, BlockView) and place.name == tensor.type.name
    if share is not None and not stays and not isinstance(place, torch.Tensor):
        # A row's scale comes from the whole row.
        whole = share.allocate_full(place)
        _put(rows, tensor, whole, heads, quantizers, None)
        share.copy_shard(whole, place)
        return
    of_head = 1 if heads is None else len(rows) // heads
    step = max(1, PIECE // tensor.shape[-1] // of_head) * of_head
    of_bytes = share if share is None or not stays else share.of_blocks(tensor.type.name)
    for begin in range(0, len(rows), step):
        if isinstance(place, BlockView) and stays:
            lying = rows[begin : begin + step]
            own = lying if of_bytes is None else of_bytes.read(lying)
            place.bytes[begin : begin + step] = own if heads is None else to_half_split(own, len(own) // of_head)
            pages.drop(lying)
            continue
        values = dequantize(tensor.type, rows[begin : begin + step])
        values = values if share is None else share.read(values)
        if heads is not None:
            values = to_half_split(values, len(values) // of_head)
        if isinstance(place, torch.Tensor):
            place[begin : begin + step].copy_(values)
        else:
            place.rows(begin, begin + step).quantize_into(values, quantizers)
