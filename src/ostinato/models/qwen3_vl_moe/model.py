"""Qwen3-VL with experts (model_type `qwen3_vl_moe`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ostinato.layers.build import Build, Target
from ostinato.layers.linear import Linear
from ostinato.layers.moe import Experts
from ostinato.models.qwen3.model import Block
from ostinato.models.qwen3_vl.model import Qwen3VL
from ostinato.models.qwen3_vl_moe.spec import MoeHyperparameters
from ostinato.plan.model import ModelSpec


class StackedExperts(Experts):
    """Experts that the checkpoint holds stacked too: one tensor inward, gates first, and one outward. Each is [experts,
    out, in] or [experts, in, out]."""

    is_stack = True

    def checkpoint_names(self, path: str) -> tuple[str, ...]:
        return (f"{path}.gate_up_proj", f"{path}.down_proj")

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield from zip(self.checkpoint_names(prefix), (self.up.target(), self.down.target()), strict=True)


class SparseMLP(nn.Module):
    """The experts that a softmax router chooses, plus the residual."""

    def __init__(self, build: Build, hidden_size: int, moe: MoeHyperparameters) -> None:
        super().__init__()
        self.op, self.top_k = build.ops.route, moe.top_k
        self.gate = Linear(build, hidden_size, moe.num_experts, keeps_dtype=True)
        self.experts = StackedExperts(build, moe.num_experts, hidden_size, moe.intermediate_size, "swiglu")

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        return self.experts(x, self.op(x, self.gate.weight, None, self.top_k), residual)


class Qwen3VLMoe(Qwen3VL):
    """The language model with its encoder."""

    transposable = (".experts.gate_up_proj", ".experts.down_proj")

    def _blocks(self, build: Build, spec: ModelSpec) -> Iterable[Block]:
        hyper, size = spec.hyperparameters, spec.hidden_size
        for i in range(spec.num_layers):
            yield Block(build, size, hyper.text, SparseMLP(build, size, hyper.moe) if i in hyper.moe.layers else None)
