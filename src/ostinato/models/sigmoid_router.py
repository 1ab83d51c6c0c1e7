"""Router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), which Nemotron-H and Kimi Linear have too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ostinato.layers.module import ModelBuilder, Module
from ostinato.plan.layers import ExpertsSpec

if TYPE_CHECKING:
    import torch


class Routing(Protocol):
    """Parameters of the choice of experts by the sigmoids of their scores, as `ops.route` defines them."""

    @property
    def experts(self) -> ExpertsSpec: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def scaling(self) -> float: ...


class SigmoidRouter(Module):
    """Router that scores experts in float32; its correction bias influences the choice, not the weights."""

    def __init__(self, build: ModelBuilder, hidden_size: int, moe: Routing) -> None:
        super().__init__()
        self.op, self.moe = build.ops.route, moe
        experts, bias = moe.experts.num_experts, "e_score_correction_bias"
        self.weight = self.declare(build, "weight", experts, hidden_size, role="router")
        self.e_score_correction_bias = self.declare(build, bias, experts, role="bias", in_float32=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ids of experts and their weights, [tokens, hidden] -> [tokens, 2, top_k]."""
        moe = self.moe
        how = (moe.experts.top_k, moe.num_groups, moe.top_groups, moe.normalize, moe.scaling)
        return self.op(x, self.weight, self.e_score_correction_bias, *how)
