"""Weights that may be quantised: a matrix in the model's dtype, or 8-bit integers with their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ostinato.layers import pages
from ostinato.ops import int8


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

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def flat(self) -> QuantizedView:
        """The rows of a stack, one behind the other."""
        stacked = self.weight.dim() - 2
        return QuantizedView(self.weight.flatten(0, stacked), self.scale.flatten(0, stacked), self.group_size)

    def of(self, i: int) -> QuantizedView:
        """One weight of a stack."""
        return QuantizedView(self.weight[i], self.scale[i], self.group_size)

    def rows(self, begin: int, end: int) -> QuantizedView:
        return QuantizedView(self.weight[begin:end], self.scale[begin:end], self.group_size)

    def put(self, values: torch.Tensor) -> None:
        """Quantises `values` [rows, in] into these rows."""
        weight, scale = int8.quantize(values.to(self.device), self.group_size)
        self.weight.copy_(weight)
        self.scale.copy_(scale)


class Matrix(nn.Module):
    """A module with one weight, or a stack of them, that may be quantised. `weight_scale` and `group_size` are None
    where it is not, or where all of a row has one scale."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.weight_scale: nn.Parameter | None = None
        self.group_size: int | None = None

    def place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Gives a weight that was deferred its memory, not quantised."""
        shape = self.weight.shape
        self.weight = nn.Parameter(pages.empty(*shape, dtype=dtype, device=device), requires_grad=False)

    def place_quantized(self, group_size: int | None, device: torch.device) -> None:
        """Gives a weight that was deferred its memory as integers, and scales beside them."""
        *rows, columns = self.weight.shape
        self.place(torch.int8, device)
        groups = () if group_size is None else (int8.num_groups(columns, group_size),)
        scale = pages.empty(*rows, *groups, dtype=torch.float32, device=device)
        self.weight_scale, self.group_size = nn.Parameter(scale, requires_grad=False), group_size

    def target(self) -> torch.Tensor | QuantizedView:
        """Where a checkpoint's values go."""
        if self.weight_scale is None:
            return self.weight.data
        return QuantizedView(self.weight.data, self.weight_scale.data, self.group_size)
