"""What every layer is built with, and how its weights are named in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from ostinato.layers import pages
from ostinato.layers.quantized import QuantizedView
from ostinato.ops.select import Ops


@dataclass(frozen=True)
class Build:
    """Kernels to call, and where and in which dtype to allocate weights.

    With `defers_matrices`, matrices that may be quantised are left to `layers.linear.place_matrices`.
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    defers_matrices: bool = False

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An unwritten weight; loading fills it, or has it lie where the file is mapped."""
        return nn.Parameter(pages.empty(*shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    def matrix(self, *shape: int) -> nn.Parameter:
        """A weight [rows, columns], or a stack of such, that may be quantised; without memory if that is deferred."""
        if not self.defers_matrices:
            return self.weight(*shape)
        empty = torch.empty(shape, dtype=self.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=False)


Target = torch.Tensor | QuantizedView
"""The part of a weight where the values of a checkpoint's tensor go."""


@runtime_checkable
class HasCheckpointViews(Protocol):
    """A module whose checkpoint tensors are not simply its parameters under their own names."""

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(name in the checkpoint, the part of a weight that holds it); `prefix` is the module's own name."""
        ...


def checkpoint_views(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Target]]:
    """Every tensor that a checkpoint of `module` holds, as a view into the weight where its values go."""
    if isinstance(module, HasCheckpointViews):
        yield from module.checkpoint_views(prefix)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield _join(prefix, name), parameter.data
    for name, child in module.named_children():
        yield from checkpoint_views(child, _join(prefix, name))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
