"""The memory of a model: what its weights are allocated with, and where a checkpoint's tensors go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ostinato.layers import pages
from ostinato.layers.linear import Matrix
from ostinato.layers.module import Module, Multiplier
from ostinato.ops import int8
from ostinato.ops.kernels import Ops
from ostinato.plan.quantization import Quantization
from ostinato.plan.weights import Weight


@dataclass(frozen=True)
class QuantizedView:
    """Rows of a quantised weight, int8 [rows, in], and of its scales, float32 [rows] or [rows, groups]; or a stack of
    such, with one more dimension before these."""

    weight: torch.Tensor
    scale: torch.Tensor
    group_size: int | None

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def flat(self) -> QuantizedView:
        """The rows of a stack, one behind the other."""
        stacked = self.weight.dim() - 2
        return QuantizedView(self.weight.flatten(0, stacked), self.scale.flatten(0, stacked), self.group_size)

    def of(self, i: int) -> QuantizedView:
        """One weight of a stack."""
        return QuantizedView(self.weight[i], self.scale[i], self.group_size)

    def rows(self, begin: int, end: int) -> QuantizedView:
        return QuantizedView(self.weight[begin:end], self.scale[begin:end], self.group_size)

    def put(self, values: torch.Tensor, quantize: int8.Quantize) -> None:
        """Quantises `values` [rows, in] into these rows."""
        quantize(values, self.weight, self.scale, self.group_size)


Target = torch.Tensor | QuantizedView
"""The part of a weight where the values of a checkpoint's tensor go."""


@dataclass(frozen=True)
class Build:
    """Kernels to call, and where and in which dtype to allocate weights.

    With `defers_matrices`, matrices that may be quantised get their memory from `place_matrices`.
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    defers_matrices: bool = False
    float32 = torch.float32

    def weight(self, row: Weight) -> torch.Tensor:
        """An unwritten weight; loading fills it, or has it lie where the file is mapped."""
        dtype = torch.float32 if row.in_float32 else self.dtype
        if self.defers_matrices and row.can_be_quantised:
            return torch.empty(row.shape, dtype=dtype, device="meta")
        return pages.empty(*row.shape, dtype=dtype, device=self.device)

    def scale(self, multiplier: Multiplier, size: int, factor: float) -> torch.Tensor | None:
        if isinstance(multiplier, tuple):
            return torch.cat([self._filled(count, value) for value, count in multiplier]) * factor
        return None if multiplier * factor == 1.0 else self._filled(size, multiplier * factor)

    def rounded(self, value: float) -> float:
        return torch.tensor(value, dtype=self.dtype).item()

    def constant(self, values: Sequence[float], dtype: str) -> torch.Tensor:
        return torch.tensor(values, dtype=getattr(torch, dtype), device=self.device)

    def stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(tensors), dim=1)

    def deferring(self) -> Build:
        return replace(self, defers_matrices=True)

    def place_matrices(self, model: Module, quantization: Quantization) -> None:
        """Gives the deferred matrices of `model` their memory, quantised or in the model's dtype."""
        for module, _, row in model.weights():
            if not isinstance(module, Matrix) or not row.can_be_quantised:
                continue
            *rows, columns = row.shape
            if not quantization.quantises(row):
                module.weight = pages.empty(*row.shape, dtype=self.dtype, device=self.device)
                continue
            group_size = quantization.group_size
            groups = () if group_size is None else (int8.num_groups(columns, group_size),)
            module.weight = pages.empty(*row.shape, dtype=torch.int8, device=self.device)
            module.weight_scale = pages.empty(*rows, *groups, dtype=torch.float32, device=self.device)
            module.group_size = group_size

    def _filled(self, size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.float32, device=self.device)


def checkpoint_views(module: Module, prefix: str = "") -> Iterator[tuple[str, Target]]:
    """Every tensor that a checkpoint of `module` holds, by its name, as a view into the weight where its values go."""
    for owner, attribute, row in module.weights(prefix):
        weight: torch.Tensor = getattr(owner, attribute)
        target: Target = weight
        if isinstance(owner, Matrix) and owner.weight_scale is not None and attribute == "weight":
            target = QuantizedView(weight, owner.weight_scale, owner.group_size)
        yield from zip(row.names, _parts(row, target), strict=True)


def _parts(row: Weight, target: Target) -> Iterator[Target]:
    """The part of each of the row's names."""
    if row.role == "experts" and not row.is_stack:
        for i in range(len(row.names)):
            yield target.of(i) if isinstance(target, QuantizedView) else target[i]
    elif len(row.names) == 1:
        if row.stored_shape:
            assert isinstance(target, torch.Tensor), "what is quantised is stored as it is"
            target = (target.t() if row.stored_transposed else target).view(row.stored_shape)
        yield target
    else:
        begin = 0
        for size in row.sizes:
            end = begin + size
            yield target.rows(begin, end) if isinstance(target, QuantizedView) else target[begin:end]
            begin = end
