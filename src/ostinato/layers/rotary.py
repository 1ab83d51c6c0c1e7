"""Rotary position embedding: the angles of a step, computed once for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ostinato.layers.build import Build
from ostinato.plan.model import RopeSpec
from ostinato.plan.rope import inverse_frequencies


class Rotary(nn.Module):
    """cos and sin of every token's angles, already multiplied by the embedding's attention scaling."""

    def __init__(self, build: Build, rope: RopeSpec) -> None:
        super().__init__()
        self.op = build.ops.rotary_angles
        frequencies, self.scaling = inverse_frequencies(rope)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float32, device=build.device)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [2, tokens, rotary_dim / 2] float32"""
        return self.op(positions, self.frequencies, self.scaling)


class AxialRotary(nn.Module):
    """The same of tokens that stand in more than a line: angle i is that of their position on axis `axes[i]`."""

    def __init__(self, build: Build, axes: Sequence[int], frequencies: Sequence[float], scaling: float) -> None:
        super().__init__()
        self.op, self.scaling = build.ops.axial_angles, scaling
        self.axes = torch.tensor(axes, dtype=torch.int64, device=build.device)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float32, device=build.device)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, axes] -> [2, tokens, angles] float32"""
        return self.op(positions, self.axes, self.frequencies, self.scaling)
