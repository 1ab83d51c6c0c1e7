"""Qwen3-Next (model_type `qwen3_next`): a gated delta net or gated attention, then experts and a shared one."""

from __future__ import annotations

from ostinato.layers.linear import Linear
from ostinato.layers.mlp import STACKED, GatedMLP, RoutedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.qwen3_5_text.model import Qwen35
from ostinato.models.qwen3_next.spec import Qwen3NextHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec


class SparseMLP(RoutedMLP):
    """Experts of a softmax router, plus a shared one times the sigmoid of its gate, plus the residual."""

    def __init__(self, build: ModelBuilder, spec: ExpertsSpec, shared_size: int, normalizes: bool) -> None:
        super().__init__(build, spec, normalizes, stacked_as=STACKED, may_be_stacked=True)
        self.shared_expert = GatedMLP(build, spec.size, shared_size)
        self.shared_expert_gate = Linear(build, spec.size, 1, can_be_quantised=False)

    def forward(self, x: Array, residual: Array | None) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        return super().forward(x, self.shared_expert(x, residual, self.shared_expert_gate(x)))


class Qwen3Next(Qwen35):
    """The language model."""

    def make_mlp(self, layer: LayerSpec) -> Module:
        hyper: Qwen3NextHyperparameters = self.spec.hyperparameters
        if layer.experts is None:
            return super().make_mlp(layer)
        return SparseMLP(self.build, layer.experts, hyper.shared_size, hyper.normalizes)
