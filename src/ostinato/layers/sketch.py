"""A model without memory, to read its weight table from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.layers.module import Multiplier
from ostinato.plan.weights import Weight


@dataclass(frozen=True)
class Shape:
    """What stands for a tensor: its shape, and its dtype by name, where `model` is the model's own."""

    shape: tuple[int, ...]
    dtype: str


class Ops:
    """What stands for the kernels of a model that is not run: none of them."""

    def __getattr__(self, name: str) -> None:
        return None


class Sketch:
    """What a model is built with that has no memory."""

    dtype: Any = "model"
    float32: Any = "float32"

    def __init__(self) -> None:
        self.ops: Any = Ops()

    def weight(self, row: Weight) -> Any:
        return Shape(row.shape, "float32" if row.in_float32 else "model")

    def scale(self, multiplier: Multiplier, size: int, factor: float) -> Any:
        return None if multiplier == factor == 1.0 else Shape((size,), "float32")

    def constant(self, values: Sequence[float], dtype: str) -> Any:
        return Shape((len(values),), dtype)

    def stack(self, tensors: Sequence[Any]) -> Any:
        first, *_ = tensors
        return Shape((first.shape[0], len(tensors), *first.shape[1:]), first.dtype)
