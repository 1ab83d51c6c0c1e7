"""Qwen3-VL with experts (model_type `qwen3_vl_moe`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.linear import Linear
from ostinato.layers.mlp import Experts
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.decoder import Block
from ostinato.models.qwen3.model import qwen3_block
from ostinato.models.qwen3_vl.model import Qwen3VL
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec

if TYPE_CHECKING:
    import torch


class SparseMLP(Module):
    """Experts of a softmax router, plus the residual. The checkpoint may store their stacks transposed."""

    def __init__(self, build: ModelBuilder, spec: ExpertsSpec) -> None:
        super().__init__()
        self.op, self.top_k = build.ops.route, spec.top_k
        self.gate = Linear(build, spec.size, spec.num_experts, role="router")
        self.experts = Experts(build, spec, "swiglu", stacked_as=("gate_up_proj", "down_proj"))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.experts(x, self.op(x, self.gate.weight, None, self.top_k), residual)


class Qwen3VLMoe(Qwen3VL):
    """Language model with its encoder."""

    transposable = (".experts.gate_up_proj", ".experts.down_proj")

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        mlp = None if layer.experts is None else SparseMLP(build, layer.experts)
        return qwen3_block(build, size, layer, self.spec.hyperparameters.text, mlp)
