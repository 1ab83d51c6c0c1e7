"""Mixture-of-experts layers: expert weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ostinato.layers.build import Build


class Experts(nn.Module):
    """The experts of a layer, stacked. Each has its own tensors in the checkpoint: `{i}.up_proj.weight` and so on."""

    def __init__(self, build: Build, num_experts: int, in_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.ops = build.ops
        self.activation = activation
        inner_size = 2 * intermediate_size if activation == "swiglu" else intermediate_size
        self.up = build.weight(num_experts, inner_size, in_size)
        self.down = build.weight(num_experts, in_size, intermediate_size)

    def forward(self, x: torch.Tensor, choices: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`x` and `residual` [tokens, in], `choices` [tokens, 2, k] as `ops.route` gives them -> [tokens, in]"""
        tensors = (x, choices) if residual is None else (x, choices, residual)
        return self.ops.tap.split("moe", self._run, tensors)

    def _run(self, x: torch.Tensor, choices: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.ops.moe(x, choices, self.up, self.down, self.activation, residual)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(self.up.shape[0]):
            yield f"{prefix}.{i}.up_proj.weight", self.up.data[i]
            yield f"{prefix}.{i}.down_proj.weight", self.down.data[i]
