"""Feed-forward layers: plain and gated."""

from __future__ import annotations

import torch
from torch import nn

from ostinato.layers.build import Build
from ostinato.layers.linear import Linear, PackedLinear


class MLP(nn.Module):
    """down_proj(activation(up_proj(x)))."""

    def __init__(
        self, build: Build, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.op = build.ops.activation
        self.activation = activation
        self.up_proj = Linear(build, hidden_size, intermediate_size, bias)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.down_proj(self.op(self.up_proj(x), self.activation))


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)).

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
        self.op = build.ops.activation
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        self.gate_up = PackedLinear(build, hidden_size, parts, bias)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias)
        self.intermediate_size = intermediate_size
        self.gate_multiplier = gate_multiplier
        self.down_multiplier = down_multiplier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        gate_up = self.gate_up(x)
        if self.gate_multiplier != 1.0:
            gate_up[:, : self.intermediate_size] *= self.gate_multiplier
        y = self.down_proj(self.op(gate_up, "swiglu"))
        return y if self.down_multiplier == 1.0 else y * self.down_multiplier
