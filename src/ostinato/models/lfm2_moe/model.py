"""LFM2 with experts (model_type `lfm2_moe`)."""

from __future__ import annotations

from ostinato.layers.linear import Linear
from ostinato.layers.mlp import Experts
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.lfm2.model import Lfm2
from ostinato.models.lfm2_moe.spec import Lfm2MoeHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec

MIN_SUM = 1e-6
"""Number added to the sum of the chosen experts' weights, by which they are divided."""


class SparseMLP(Module):
    """Experts of a sigmoid router, plus the residual; a bias influences the choice, not the weights."""

    def __init__(self, build: ModelBuilder, spec: ExpertsSpec, hyper: Lfm2MoeHyperparameters) -> None:
        super().__init__()
        self.op, self.top_k, self.hyper = build.ops.route, spec.top_k, hyper
        self.gate = Linear(build, spec.size, spec.num_experts, role="router")
        if hyper.has_expert_bias:
            self.expert_bias = self.declare(build, "expert_bias", spec.num_experts, role="bias", in_float32=True)
        else:
            self.expert_bias = build.constant([0.0] * spec.num_experts, "float32")
        self.experts = Experts(build, spec, "swiglu", names=("w1", "w3", "w2"))

    def forward(self, x: Array, residual: Array) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        how = {"normalize": self.hyper.normalize, "scaling": self.hyper.scaling, "sum_epsilon": MIN_SUM}
        return self.experts(x, self.op(x, self.gate.weight, self.expert_bias, self.top_k, **how), residual)


class Lfm2Moe(Lfm2):
    """The language model."""

    def make_mlp(self, layer: LayerSpec) -> Module:
        if layer.experts is None:
            return super().make_mlp(layer)
        return SparseMLP(self.build, layer.experts, self.spec.hyperparameters)
