"""Rotary position embedding: the angles of a step, computed once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.module import ModelBuilder, Module
from ostinato.plan.rope import RopeSpec, inverse_frequencies

if TYPE_CHECKING:
    import torch


class Rotary(Module):
    """Cosine and sine of every token's angles, already multiplied by the embedding's attention scaling."""

    def __init__(self, build: ModelBuilder, rope: RopeSpec) -> None:
        super().__init__()
        self.op = build.ops.rotary_angles
        frequencies, self.scaling = inverse_frequencies(rope)
        self.frequencies = build.constant(frequencies, "float32")

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles of positions, [tokens] -> [2, tokens, rotary_dim / 2] float32."""
        return self.op(positions, self.frequencies, self.scaling)


class AxialRotary(Module):
    """Cosine and sine of tokens whose positions have several axes.

    Angle i is that of the position on axis `axes[i]`.
    """

    def __init__(self, build: ModelBuilder, axes: Sequence[int], frequencies: Sequence[float], scaling: float) -> None:
        super().__init__()
        self.op, self.scaling = build.ops.axial_angles, scaling
        self.axes = build.constant(axes, "int64")
        self.frequencies = build.constant(frequencies, "float32")

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles of positions, [tokens, axes] -> [2, tokens, angles] float32."""
        return self.op(positions, self.axes, self.frequencies, self.scaling)
