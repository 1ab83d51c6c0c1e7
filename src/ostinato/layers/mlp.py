"""Feed-forward layers: plain and gated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import Builder, Module, Multiplier

if TYPE_CHECKING:
    import torch


class MLP(Module):
    """down_proj(activation(up_proj(x))) + residual."""

    def __init__(
        self, build: Builder, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = Linear(build, hidden_size, intermediate_size, bias)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        return self.down_proj(self.up_proj(x, activation=self.activation), residual)


class GatedMLP(Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)) + residual.

    `gate_multiplier` and `down_multiplier` scale the gate before its activation and the result (Falcon-H1).
    """

    def __init__(
        self,
        build: Builder,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        size = intermediate_size
        multiplier: Multiplier = 1.0 if gate_multiplier == 1.0 else ((gate_multiplier, size), (1.0, size))
        self.gate_up = PackedLinear(build, hidden_size, (("gate_proj", size), ("up_proj", size)), bias, multiplier)
        self.down_proj = Linear(build, size, hidden_size, bias, down_multiplier)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        return self.down_proj(self.gate_up(x, activation="swiglu"), residual)
