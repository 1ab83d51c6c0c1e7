"""Weights that may be quantised: a matrix in the model's dtype, or 8-bit integers with their scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ostinato.layers.module import Builder, Module
from ostinato.plan.weights import Role

if TYPE_CHECKING:
    from typing import Any

    import torch


class Matrix(Module):
    """A module with one weight, or a stack of them, that may be quantised. `weight_scale` and `group_size` are None
    where it is not, or where all of a row has one scale."""

    def __init__(self, build: Builder, *shape: int, role: Role, **facts: Any) -> None:
        super().__init__()
        self.weight_scale: torch.Tensor | None = None
        self.group_size: int | None = None
        self.weight = self.own(build, "weight", *shape, role=role, **facts)

    def own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().own_tensors()
        if self.weight_scale is not None:
            yield "weight_scale", self.weight_scale

    @property
    def quantization(self) -> tuple[torch.Tensor, int | None] | tuple[()]:
        """What a kernel takes behind its other arguments: the scales, and how many elements share one."""
        return () if self.weight_scale is None else (self.weight_scale, self.group_size)
