"""Memory of a model: the allocation of its weights, and the targets of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from ostinato.layers.module import Module, Multiplier, QuantizableMatrix
from ostinato.ops.arrays import Arrays, converted, dtype_name, library, on_host
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks, num_bytes, slice_rows
from ostinato.ops.quant.quantize import WeightQuantizers
from ostinato.plan.quantization import AnyQuantization, BlockQuantization
from ostinato.plan.tensor_parallel import SINGLE_RANK, Rank
from ostinato.plan.weights import Weight

if TYPE_CHECKING:
    from ostinato.ops.dispatch import Ops
    from ostinato.ops.step_inputs import Array


@dataclass(frozen=True)
class QuantizedView:
    """Rows of a quantised weight, int8 [rows, in], and of its scales, float32 [rows] or [rows, groups].

    A stack of such weights has one more dimension before these.
    """

    weight: Array
    scale: Array
    group_size: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def flat(self) -> QuantizedView:
        """Return the concatenated rows of a stack."""
        *rows, columns = self.weight.shape
        groups = self.scale.shape[len(rows) :]
        return QuantizedView(self.weight.reshape(-1, columns), self.scale.reshape(-1, *groups), self.group_size)

    def of(self, i: int) -> QuantizedView:
        """Return one weight of a stack."""
        return QuantizedView(self.weight[i], self.scale[i], self.group_size)

    def rows(self, begin: int, end: int) -> QuantizedView:
        return QuantizedView(self.weight[begin:end], self.scale[begin:end], self.group_size)

    def quantize_into(self, values: np.ndarray, quantizers: WeightQuantizers) -> None:
        """Quantise `values` [rows, in] into these rows."""
        quantizers.int8(values, self.weight, self.scale, self.group_size)


@dataclass(frozen=True)
class BlockView:
    """Rows of a weight in blocks of the format `name`: uint8 [rows, bytes of a row].

    A stack of such weights has one more dimension before these. A row has `in_size` elements. `order` int32 [in_size]
    maps them to inputs; without it, element i belongs to input i. Until the order is known, it is `NO_ORDER`.
    """

    bytes: Array
    name: str
    in_size: int
    order: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""
        return (*self.bytes.shape[:-1], self.in_size)

    def flat(self) -> BlockView:
        """Return the concatenated rows of a stack."""
        return replace(self, bytes=self.bytes.reshape(-1, self.bytes.shape[-1]))

    def of(self, i: int) -> BlockView:
        """Return one weight of a stack."""
        return replace(self, bytes=self.bytes[i])

    def rows(self, begin: int, end: int) -> BlockView:
        return replace(self, bytes=self.bytes[begin:end])

    def quantize_into(self, values: np.ndarray, quantizers: WeightQuantizers) -> None:
        """Quantise `values` [rows, in] into these rows, if the format can be quantised to."""
        quantizers.quantize_blocks(values, self.bytes, self.name)


NO_ORDER = -1

WeightTarget: TypeAlias = "Array | QuantizedView | BlockView"
"""Part of a weight that receives the values of a checkpoint's tensor."""


def target_on_host(target: WeightTarget) -> WeightTarget:
    """Return a target whose arrays are numpy's of the same memory, as far as that is a CPU's."""
    if isinstance(target, QuantizedView):
        return QuantizedView(on_host(target.weight), on_host(target.scale), target.group_size)
    if isinstance(target, BlockView):
        order = None if target.order is None else on_host(target.order)
        return replace(target, bytes=on_host(target.bytes), order=order)
    return on_host(target)


@dataclass(frozen=True)
class WeightAllocator:
    """Kernels to call, and the maker and the dtype of weights.

    With `defers_matrices`, matrices that may be quantised, or stored in blocks, get their memory from
    `allocate_matrices`, or from the loader if they stay in their file's pages.
    """

    ops: Ops
    arrays: Arrays
    dtype_name: str
    defers_matrices: bool = False
    rank: Rank = SINGLE_RANK

    @cached_property
    def dtype(self) -> Any:
        """Dtype of the model, as its arrays have it."""
        return self.arrays.dtype(self.dtype_name)

    @cached_property
    def float32(self) -> Any:
        return self.arrays.dtype("float32")

    def weight(self, row: Weight) -> Array:
        """Allocate an unwritten weight; loading fills it, or replaces it by the mapped file's pages."""
        dtype = "float32" if row.in_float32 else self.dtype_name
        if row.stays_on_disk:
            return self.arrays.without_memory(row.shape, dtype)
        if self.defers_matrices and (row.can_be_quantised or row.can_be_blocks):
            return self.arrays.without_memory(row.shape, dtype)
        return self.arrays.empty(row.shape, dtype)

    def scale(self, multiplier: Multiplier, size: int, factor: float) -> Array | None:
        if isinstance(multiplier, tuple):
            values = [np.full(count, value, np.float32) for value, count in multiplier]
            return self.arrays.of(np.concatenate(values) * np.float32(factor))
        return None if multiplier * factor == 1.0 else self.arrays.of(np.full(size, multiplier * factor, np.float32))

    def rounded(self, value: float) -> float:
        return float(converted(cast("Array", np.array(value, np.float32)), self.dtype_name))

    def constant(self, values: Sequence[float], dtype: object) -> Array:
        return self.arrays.of(values, dtype_name(dtype))

    def repeat(self, x: Array, count: int) -> Array:
        tokens, heads, size = x.shape
        repeated: Array = library(x).broadcast_to(x.reshape(tokens, heads, 1, size), (tokens, heads, count, size))
        return repeated.reshape(tokens, heads * count, size)

    def with_deferred_matrices(self) -> WeightAllocator:
        return replace(self, defers_matrices=True)

    def allocate_matrices(self, model: Module, quantization: AnyQuantization) -> None:
        """Allocate the deferred matrices of `model`, quantised or in the model's dtype."""
        for module, attribute, row in model.weights():
            if not (row.can_be_quantised or row.can_be_blocks):
                continue
            if not isinstance(module, QuantizableMatrix):
                setattr(module, attribute, self.arrays.empty(row.shape, self.dtype_name))
                continue
            *rows, columns = row.shape
            if not quantization.quantises(row):
                module.weight = self.arrays.empty(row.shape, self.dtype_name)
                continue
            if isinstance(quantization, BlockQuantization):
                module.blocks = quantization.blocks_of(row)
                assert module.blocks is not None, "it is in blocks"
                shape = _shape_in_blocks(module.blocks, tuple(row.shape))
                if quantization.has_act_order:
                    module.order = self.arrays.of(np.full(columns, NO_ORDER, np.int32))
                if quantization.is_mapped(row):
                    module.weight = self.arrays.without_memory(shape, "uint8")
                else:
                    module.weight = self.arrays.empty(shape, "uint8")
                continue
            group_size = quantization.group_size
            groups = () if group_size is None else (quantize.num_groups(columns, group_size),)
            module.weight = self.arrays.empty(row.shape, "int8")
            module.weight_scale = self.arrays.empty((*rows, *groups), "float32")
            module.group_size = group_size
            module.int8_activations = quantization.quantises_inputs(row)


def checkpoint_views(module: Module, found: Container[str] = ()) -> Iterator[tuple[str, WeightTarget]]:
    """Yield every tensor of a checkpoint of `module`: its name, and a view into the weight that receives its values.

    `found` are names that are in the checkpoint: of several forms that it may have, these are used.
    """
    for owner, attribute, row in module.weights():
        if row.whole_name and row.whole_name in found:
            row = replace(row, names=(row.whole_name,), sizes=(), is_stack=row.role == "experts")
        weight: Array = getattr(owner, attribute)
        target: Array | QuantizedView = weight
        if isinstance(owner, QuantizableMatrix) and owner.weight_scale is not None and attribute == "weight":
            target = QuantizedView(weight, owner.weight_scale, owner.group_size)
        if isinstance(owner, QuantizableMatrix) and owner.blocks is not None and attribute == "weight":
            views = _parts_in_blocks(row, weight, owner.blocks)
            yield from ((name, replace(view, order=owner.order)) for name, view in zip(row.names, views, strict=True))
            continue
        yield from zip(row.names, _parts(row, target), strict=True)


def _parts(row: Weight, target: Array | QuantizedView) -> Iterator[WeightTarget]:
    """Yield the part of each of the row's names."""
    if row.role == "experts" and not row.is_stack:
        yield from _of_each_expert(row, target)
        return
    if row.stored_shape:
        assert not isinstance(target, QuantizedView), "what is quantised is stored as it is"
        target = target.T if row.stored_transposed else target
        if not row.sizes:
            yield _view(target, row.stored_shape)
            return
    begin = 0
    for i, size in enumerate(row.sizes or target.shape[:1]):
        if isinstance(target, QuantizedView):
            yield target.rows(begin, begin + size)
        else:
            rows = target[begin : begin + size]
            shape = (size, *row.stored_shape[1:]) if row.stored_shape else rows.shape
            yield _view(rows, row.stored_shapes[i] if row.stored_shapes else shape)
        begin += size


def _view(array: Array, shape: tuple[int, ...]) -> Array:
    """Return the same memory in another shape."""
    view = array.reshape(shape)
    if isinstance(view, np.ndarray):
        assert np.may_share_memory(view, cast(np.ndarray, array)), "a target is a view of its weight"
    return view


def _of_each_expert(row: Weight, stack: WeightTarget) -> Iterator[WeightTarget]:
    """Yield the part of each of the names of a stack that a checkpoint has in pieces.

    An expert's inward matrix may be two consecutive tensors.
    """
    parts = len(row.names) // row.shape[0]
    size = row.shape[1] // parts
    for i, part in product(range(row.shape[0]), range(parts)):
        begin, end = part * size, (part + 1) * size
        yield (stack.of(i).rows(begin, end) if isinstance(stack, QuantizedView | BlockView) else stack[i][begin:end])


def _shape_in_blocks(blocks: Blocks, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the bytes of a weight with this shape."""
    *outer, in_size = shape
    if len(blocks) > 1:
        return (num_bytes(blocks, in_size),)
    return (*outer, BLOCK_FORMATS[blocks[0][0]].row_bytes(in_size))


def _parts_in_blocks(row: Weight, weight: Array, blocks: Blocks) -> Iterator[BlockView]:
    """Yield the part of each of the row's names in a weight in blocks."""
    name, in_size = blocks[0][0], row.in_size
    if row.role == "experts":
        stack = BlockView(weight, name, in_size)
        for each in [stack] if row.is_stack else _of_each_expert(row, stack):
            assert isinstance(each, BlockView), "a part of blocks is blocks"
            yield each
        return
    begin, flat = 0, weight.reshape(-1)
    for size in row.sizes or (row.out_size // len(row.names),) * len(row.names):
        first, last = (num_bytes(slice_rows(blocks, 0, rows), in_size) for rows in (begin, begin + size))
        ((name, rows),) = slice_rows(blocks, begin, begin + size)
        yield BlockView(flat[first:last].reshape(rows, -1), name, in_size)
        begin += size
