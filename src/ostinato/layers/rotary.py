"""Rotary position embedding: the angles of a step, computed once for all layers."""

from __future__ import annotations

import torch
from torch import nn

from ostinato.plan.model import RopeSpec
from ostinato.plan.rope import inverse_frequencies


class Rotary(nn.Module):
    """cos and sin of every token's angles, already multiplied by the embedding's attention scaling."""

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        super().__init__()
        frequencies, self.scaling = inverse_frequencies(rope)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens] -> cos and sin, each [tokens, rotary_dim / 2] float32"""
        angles = positions.float().unsqueeze(-1) * self.frequencies
        return angles.cos() * self.scaling, angles.sin() * self.scaling
