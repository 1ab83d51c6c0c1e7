"""Feed-forward layers: plain and gated."""

from __future__ import annotations

import torch
from torch import nn

from ostinato.layers.build import Build
from ostinato.layers.linear import Linear, PackedLinear


class MLP(nn.Module):
    """down_proj(activation(up_proj(x))) + residual."""

    def __init__(
        self, build: Build, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = Linear(build, hidden_size, intermediate_size, bias)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        return self.down_proj(self.up_proj(x, activation=self.activation), residual)


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)) + residual.

    `gate_multiplier` and `down_multiplier` scale the gate before its activation and the result (Falcon-H1).
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        multiplier: float | torch.Tensor = 1.0
        if gate_multiplier != 1.0:
            multiplier = torch.ones(2 * intermediate_size, dtype=torch.float32, device=build.device)
            multiplier[:intermediate_size] = gate_multiplier
        self.gate_up = PackedLinear(build, hidden_size, parts, bias, multiplier)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias, down_multiplier)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        return self.down_proj(self.gate_up(x, activation="swiglu"), residual)
