"""Mixture-of-experts layers: expert weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ostinato.layers.build import Build, Target
from ostinato.layers.quantized import Matrix, QuantizedView


class Experts(nn.Module):
    """The experts of a layer, stacked. Each has its own tensors in the checkpoint: `{i}.up_proj.weight` and so on."""

    is_stack = False
    """Whether they are stacked in the checkpoint too."""

    def __init__(self, build: Build, num_experts: int, in_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.ops = build.ops
        self.activation = activation
        inner_size = 2 * intermediate_size if activation == "swiglu" else intermediate_size
        self.num_experts = num_experts
        self.up = Matrix(build.matrix(num_experts, inner_size, in_size))
        self.down = Matrix(build.matrix(num_experts, in_size, intermediate_size))

    def forward(self, x: torch.Tensor, choices: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`x` and `residual` [tokens, in], `choices` [tokens, 2, k] as `ops.route` gives them -> [tokens, in]"""
        tensors = (x, choices) if residual is None else (x, choices, residual)
        return self.ops.tap.split("moe", self._run, tensors)

    def _run(self, x: torch.Tensor, choices: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        up, down = self.up, self.down
        quantization = () if up.weight_scale is None else (up.weight_scale, down.weight_scale, up.group_size)
        return self.ops.moe(x, choices, up.weight, down.weight, self.activation, residual, *quantization)

    def checkpoint_names(self, path: str) -> tuple[str, ...]:
        """The checkpoint's names of their matrices, which are quantised together; the model calls the module `path`."""
        return tuple(f"{path}.{i}.{part}" for i in range(self.num_experts) for part in ("up_proj", "down_proj"))

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Target]]:
        targets = [(part, matrix.target()) for part, matrix in (("up_proj", self.up), ("down_proj", self.down))]
        for i in range(self.num_experts):
            for part, target in targets:
                one = target.of(i) if isinstance(target, QuantizedView) else target[i]
                yield f"{prefix}.{i}.{part}.weight", one
