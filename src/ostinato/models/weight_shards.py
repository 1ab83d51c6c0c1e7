"""A rank's shards of a checkpoint's tensors. They follow from the sizes of its model and of the model without ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ostinato.layers.allocation import (
    NO_ORDER,
    BlockView,
    QuantizedView,
    WeightAllocator,
    WeightTarget,
    checkpoint_views,
)
from ostinato.models.base import CausalLM
from ostinato.models.registry import make_model
from ostinato.ops.arrays import NUMPY, ShapesOnly, dtype_name, host_values, write
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.quant.quantize import num_groups
from ostinato.plan.tensor_parallel import Rank, vocabulary_part
from ostinato.plan.weights import Weight


@dataclass(frozen=True)
class TensorShard:
    """Parts of a tensor of `shape` that a rank has, concatenated along `dim`: (first, end) each."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[tuple[int, int], ...]

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """Return the rank's part of `tensor`. A single part is a view of it."""
        before = (slice(None),) * self.dim
        parts = [tensor[(*before, slice(first, end))] for first, end in self.parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, self.dim)

    def allocate_full(self, place: WeightTarget) -> WeightTarget:
        """Allocate a target for the whole tensor on the host; `place` is the rank's part."""
        *rows, columns = self.shape
        if isinstance(place, BlockView):
            row_bytes = BLOCK_FORMATS[place.name].row_bytes(columns)
            order = place.order
            if order is not None and self.cuts_rows:
                order = NUMPY.sharing(np.full(columns, NO_ORDER, np.int32))
            return BlockView(NUMPY.empty((*rows, row_bytes), "uint8"), place.name, columns, order)
        if isinstance(place, QuantizedView):
            groups = () if place.group_size is None else (num_groups(columns, place.group_size),)
            scale = NUMPY.empty((*rows, *groups), "float32")
            return QuantizedView(NUMPY.empty(self.shape, "int8"), scale, place.group_size)
        return NUMPY.empty(self.shape, dtype_name(place.dtype))

    def copy_shard(self, whole: WeightTarget, place: WeightTarget) -> None:
        """Copy the rank's part of `whole`, a target of the same kind on the host, to `place`."""
        if isinstance(place, BlockView) and isinstance(whole, BlockView):
            write(place.bytes, self.of_blocks(place.name).read(host_values(whole.bytes)))
            if self.cuts_rows and place.order is not None and whole.order is not None:
                # Groups are adjacent in a row, so a part of it has whole groups, with inputs of all ranks.
                assert len(self.parts) == 1, "inputs that have an order are cut into one part for each rank"
                write(place.order, host_values(whole.order[slice(*self.parts[0])]))
        elif isinstance(place, QuantizedView) and isinstance(whole, QuantizedView):
            write(place.weight, self.read(host_values(whole.weight)))
            scale = host_values(whole.scale)
            if not self.cuts_rows or place.group_size is not None:
                scale = self._in_units(place.group_size or 1).read(scale)
            write(place.scale, scale)
        else:
            assert not isinstance(place, BlockView | QuantizedView), "they are of the same kind"
            assert not isinstance(whole, BlockView | QuantizedView), "they are of the same kind"
            write(place, self.read(host_values(whole)))

    def of_one(self) -> TensorShard:
        """Return the share of one matrix of a stack."""
        return replace(self, shape=self.shape[1:], dim=self.dim - 1)

    def of_half(self, half: int) -> TensorShard:
        """Return the share of the first or the second half of a matrix's rows, which are separate tensors.

        A rank's share of both halves has two parts. Experts' biases are cut so along their last dimension.
        """
        *outer, rows, columns = self.shape
        if len(self.parts) == 1:
            return replace(self, shape=(*outer, rows // 2, columns))
        first, end = self.parts[half]
        shape, size = list(self.shape), self.shape[self.dim] // 2
        shape[self.dim] = size
        return TensorShard(tuple(shape), self.dim, ((first - half * size, end - half * size),))

    def of_blocks(self, name: str) -> TensorShard:
        """Return the share of the bytes of rows in blocks of the format `name`."""
        kind = BLOCK_FORMATS[name]
        return self._in_units(kind.elements, kind.num_bytes)

    @property
    def cuts_rows(self) -> bool:
        """True if each rank has some elements of every row."""
        return self.dim == len(self.shape) - 1

    def _in_units(self, elements: int, size: int = 1) -> TensorShard:
        """Return the share of a tensor that stores each `elements` elements of a row as `size` of its own."""
        if not self.cuts_rows:
            return self
        assert not any(edge % elements for part in self.parts for edge in part), "which the plan has checked"
        parts = ((first // elements * size, end // elements * size) for first, end in self.parts)
        return replace(self, parts=tuple(parts))


def tensor_shards(model: CausalLM, found: Container[str] = ()) -> dict[str, TensorShard]:
    """Return by name the tensors that this rank holds only a shard of. `found` as for `checkpoint_views`."""
    whole_spec = model.spec.unsharded
    if whole_spec is None:
        return {}
    rank = model.build.rank
    # The whole model has the prediction head if this one has it.
    drafter = None if model.head is None else whole_spec.head
    build = WeightAllocator(model.build.ops, ShapesOnly(), "float32")
    whole = make_model(build, replace(whole_spec, drafter=drafter))
    shard_shapes = {name: tuple(view.shape) for name, view in checkpoint_views(model, found=found)}
    segments, of_whole = _segments(model), _segments(whole)
    vocabulary = {row.names[0] for _, _, row in model.weights() if row.role == "embedding" or row.is_lm_head}
    shares = {}
    for name, view in checkpoint_views(whole, found=found):
        shape, part = tuple(view.shape), shard_shapes[name]
        if shape == part:
            continue
        [dim] = [i for i, (size, have) in enumerate(zip(shape, part, strict=True)) if size != have]
        if name in vocabulary:
            first = vocabulary_part(shape[dim], rank).first
            shares[name] = TensorShard(shape, dim, ((first, first + part[dim]),))
            continue
        sizes = segments[name], of_whole[name]
        if (sum(sizes[0]), sum(sizes[1])) != (part[dim], shape[dim]):
            sizes = (part[dim],), (shape[dim],)
        shares[name] = TensorShard(shape, dim, tuple(_parts(*sizes, rank)))
    return shares


def _parts(shard: tuple[int, ...], whole: tuple[int, ...], rank: Rank) -> list[tuple[int, int]]:
    """Return the rank's part of each segment; if there are fewer parts than ranks, neighbours have the same one."""
    parts, begin = [], 0
    for have, size in zip(shard, whole, strict=True):
        count = size // have
        assert size % have == rank.of % count == 0, "ranks have equal parts"
        first = begin + rank.number * count // rank.of * have
        parts.append((first, first + have))
        begin += size
    return parts


def _segments(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the segments of each tensor, by name."""
    return {name: segments for _, _, row in model.weights() for name, segments in _segments_of(row)}


def _segments_of(row: Weight) -> Iterator[tuple[str, tuple[int, ...]]]:
    if row.whole_name:
        yield row.whole_name, row.segments
    if not row.segments or sum(row.segments) != sum(row.sizes):
        yield from ((name, row.segments) for name in row.names)
        return
    left = iter(row.segments)
    for name, size in zip(row.names, row.sizes, strict=True):
        segments: tuple[int, ...] = ()
        while sum(segments) < size:
            segments += (next(left),)
        yield name, segments
