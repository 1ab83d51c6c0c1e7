"""Memory of a model: the allocation of its weights, and the targets of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ostinato.layers import huge_pages
from ostinato.layers.module import Module, Multiplier, QuantizableMatrix
from ostinato.ops.dispatch import Ops
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks, num_bytes, slice_rows
from ostinato.ops.quant.quantize import WeightQuantizers
from ostinato.plan.quantization import AnyQuantization, BlockQuantization
from ostinato.plan.tensor_parallel import SINGLE_RANK, Rank
from ostinato.plan.weights import Weight


@dataclass(frozen=True)
class QuantizedView:
    """Rows of a quantised weight, int8 [rows, in], and of its scales, float32 [rows] or [rows, groups].

    A stack of such weights has one more dimension before these.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    group_size: int | None

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def flat(self) -> QuantizedView:
        """Return the concatenated rows of a stack."""
        stacked = self.weight.dim() - 2
        return QuantizedView(self.weight.flatten(0, stacked), self.scale.flatten(0, stacked), self.group_size)

    def of(self, i: int) -> QuantizedView:
        """Return one weight of a stack."""
        return QuantizedView(self.weight[i], self.scale[i], self.group_size)

    def rows(self, begin: int, end: int) -> QuantizedView:
        return QuantizedView(self.weight[begin:end], self.scale[begin:end], self.group_size)

    def quantize_into(self, values: torch.Tensor, quantizers: WeightQuantizers) -> None:
        """Quantise `values` [rows, in] into these rows."""
        quantizers.int8(values, self.weight, self.scale, self.group_size)


@dataclass(frozen=True)
class BlockView:
    """Rows of a weight in blocks of the format `name`: uint8 [rows, bytes of a row].

    A stack of such weights has one more dimension before these. A row has `in_size` elements. `order` int32 [in_size]
    maps them to inputs; without it, element i belongs to input i. Until the order is known, it is `NO_ORDER`.
    """

    bytes: torch.Tensor
    name: str
    in_size: int
    order: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape in elements."""
        return torch.Size((*self.bytes.shape[:-1], self.in_size))

    def flat(self) -> BlockView:
        """Return the concatenated rows of a stack."""
        return replace(self, bytes=self.bytes.flatten(0, -2))

    def of(self, i: int) -> BlockView:
        """Return one weight of a stack."""
        return replace(self, bytes=self.bytes[i])

    def rows(self, begin: int, end: int) -> BlockView:
        return replace(self, bytes=self.bytes[begin:end])

    def quantize_into(self, values: torch.Tensor, quantizers: WeightQuantizers) -> None:
        """Quantise `values` [rows, in] into these rows, if the format can be quantised to."""
        quantizers.quantize_blocks(values, self.bytes, self.name)


NO_ORDER = -1

WeightTarget = torch.Tensor | QuantizedView | BlockView
"""Part of a weight that receives the values of a checkpoint's tensor."""


@dataclass(frozen=True)
class WeightAllocator:
    """Kernels to call, and the device and dtype of weights.

    With `defers_matrices`, matrices that may be quantised, or stored in blocks, get their memory from
    `allocate_matrices`, or from the loader if they stay in their file's pages.
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    defers_matrices: bool = False
    rank: Rank = SINGLE_RANK
    float32 = torch.float32

    def weight(self, row: Weight) -> torch.Tensor:
        """Allocate an unwritten weight; loading fills it, or replaces it by the mapped file's pages."""
        dtype = torch.float32 if row.in_float32 else self.dtype
        if self.defers_matrices and (row.can_be_quantised or row.can_be_blocks):
            return torch.empty(row.shape, dtype=dtype, device="meta")
        return huge_pages.empty(*row.shape, dtype=dtype, device=self.device)

    def scale(self, multiplier: Multiplier, size: int, factor: float) -> torch.Tensor | None:
        if isinstance(multiplier, tuple):
            return torch.cat([self._filled(count, value) for value, count in multiplier]) * factor
        return None if multiplier * factor == 1.0 else self._filled(size, multiplier * factor)

    def rounded(self, value: float) -> float:
        return torch.tensor(value, dtype=self.dtype).item()

    def constant(self, values: Sequence[float], dtype: str | torch.dtype) -> torch.Tensor:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.tensor(values, dtype=dtype, device=self.device)

    def stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(tensors), dim=1)

    def repeat(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unsqueeze(2).expand(-1, -1, count, -1).contiguous().flatten(1, 2)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)

    def with_deferred_matrices(self) -> WeightAllocator:
        return replace(self, defers_matrices=True)

    def allocate_matrices(self, model: Module, quantization: AnyQuantization) -> None:
        """Allocate the deferred matrices of `model`, quantised or in the model's dtype."""
        for module, attribute, row in model.weights():
            if not (row.can_be_quantised or row.can_be_blocks):
                continue
            if not isinstance(module, QuantizableMatrix):
                setattr(module, attribute, huge_pages.empty(*row.shape, dtype=self.dtype, device=self.device))
                continue
            *rows, columns = row.shape
            if not quantization.quantises(row):
                module.weight = huge_pages.empty(*row.shape, dtype=self.dtype, device=self.device)
                continue
            if isinstance(quantization, BlockQuantization):
                module.blocks = quantization.blocks_of(row)
                assert module.blocks is not None, "it is in blocks"
                shape = _shape_in_blocks(module.blocks, tuple(row.shape))
                if quantization.has_act_order:
                    module.order = torch.full((columns,), NO_ORDER, dtype=torch.int32, device=self.device)
                if quantization.is_mapped(row):
                    module.weight = torch.empty(shape, dtype=torch.uint8, device="meta")
                else:
                    module.weight = huge_pages.empty(*shape, dtype=torch.uint8, device=self.device)
                continue
            group_size = quantization.group_size
            groups = () if group_size is None else (quantize.num_groups(columns, group_size),)
            module.weight = huge_pages.empty(*row.shape, dtype=torch.int8, device=self.device)
            module.weight_scale = huge_pages.empty(*rows, *groups, dtype=torch.float32, device=self.device)
            module.group_size = group_size

    def _filled(self, size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.float32, device=self.device)


def checkpoint_views(
    module: Module, prefix: str = "", found: Container[str] = ()
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield every tensor of a checkpoint of `module`: its name, and a view into the weight that receives its values.

    `found` are names that are in the checkpoint: of several forms that it may have, these are used.
    """
    for owner, attribute, row in module.weights(prefix):
        if row.whole_name and row.whole_name in found:
            row = replace(row, names=(row.whole_name,), sizes=(), is_stack=row.role == "experts")
        weight: torch.Tensor = getattr(owner, attribute)
        target: torch.Tensor | QuantizedView = weight
        if isinstance(owner, QuantizableMatrix) and owner.weight_scale is not None and attribute == "weight":
            target = QuantizedView(weight, owner.weight_scale, owner.group_size)
        if isinstance(owner, QuantizableMatrix) and owner.blocks is not None and attribute == "weight":
            views = _parts_in_blocks(row, weight, owner.blocks)
            yield from ((name, replace(view, order=owner.order)) for name, view in zip(row.names, views, strict=True))
            continue
        yield from zip(row.names, _parts(row, target), strict=True)


def _parts(row: Weight, target: torch.Tensor | QuantizedView) -> Iterator[WeightTarget]:
    """Yield the part of each of the row's names."""
    if row.role == "experts" and not row.is_stack:
        yield from _of_each_expert(row, target)
        return
    if row.stored_shape:
        assert isinstance(target, torch.Tensor), "what is quantised is stored as it is"
        target = target.t() if row.stored_transposed else target
    begin = 0
    for size in row.sizes or (row.stored_shape or target.shape)[:1]:
        if isinstance(target, QuantizedView):
            yield target.rows(begin, begin + size)
        else:
            rows = target[begin : begin + size]
            yield rows.view(size, *row.stored_shape[1:]) if row.stored_shape else rows
        begin += size


def _of_each_expert(row: Weight, stack: WeightTarget) -> Iterator[WeightTarget]:
    """Yield the part of each of the names of a stack that a checkpoint has in pieces.

    An expert's inward matrix may be two consecutive tensors.
    """
    parts = len(row.names) // row.shape[0]
    size = row.shape[1] // parts
    for i, part in product(range(row.shape[0]), range(parts)):
        begin, end = part * size, (part + 1) * size
        yield stack[i][begin:end] if isinstance(stack, torch.Tensor) else stack.of(i).rows(begin, end)


def _shape_in_blocks(blocks: Blocks, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the bytes of a weight with this shape."""
    *outer, in_size = shape
    if len(blocks) > 1:
        return (num_bytes(blocks, in_size),)
    return (*outer, BLOCK_FORMATS[blocks[0][0]].row_bytes(in_size))


def _parts_in_blocks(row: Weight, weight: torch.Tensor, blocks: Blocks) -> Iterator[BlockView]:
    """Yield the part of each of the row's names in a weight in blocks."""
    name, in_size = blocks[0][0], row.in_size
    if row.role == "experts":
        stack = BlockView(weight, name, in_size)
        for each in [stack] if row.is_stack else _of_each_expert(row, stack):
            assert isinstance(each, BlockView), "a part of blocks is blocks"
            yield each
        return
    begin, flat = 0, weight.view(-1)
    for size in row.sizes or (row.out_size // len(row.names),) * len(row.names):
        first, last = (num_bytes(slice_rows(blocks, 0, rows), in_size) for rows in (begin, begin + size))
        ((name, rows),) = slice_rows(blocks, begin, begin + size)
        yield BlockView(flat[first:last].view(rows, -1), name, in_size)
        begin += size
