"""Granite with windows (model_type `granite_swa`, and with experts `granitemoe_swa`)."""

from __future__ import annotations

from ostinato.layers.mlp import Experts, GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.decoder import Block
from ostinato.models.granite_swa.spec import GraniteSwaHyperparameters
from ostinato.models.granitemoehybrid.model import Granite, SharedMLP, SoftmaxRouter
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec


class MoE(Module):
    """Routed experts, times `multiplier`, plus the residual."""

    def __init__(self, build: ModelBuilder, spec: ExpertsSpec, multiplier: float) -> None:
        super().__init__()
        self.router = SoftmaxRouter(build, spec, multiplier)
        self.router.layer.is_in_checkpoint = False
        self.experts = Experts(build, spec, "swiglu", stacked_as=("gate_up_proj", "down_proj"))

    def forward(self, x: Array, residual: Array) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.experts(x, self.router(x), residual)


class GraniteSwa(Granite):
    """The language model."""

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: GraniteSwaHyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        multiplier, inner = hyper.residual_multiplier, hyper.intermediate_size
        attention = self.make_attention(layer.attention)
        if layer.experts is None:
            gated = GatedMLP(build, size, inner, hyper.mlp_bias, down_multiplier=multiplier)
            return Block(build, size, hyper.norm_eps, attention=attention, mlp=gated)
        experts = MoE(build, layer.experts, multiplier)
        if not inner:
            names = {"mlp": "block_sparse_moe"}
            return Block(build, size, hyper.norm_eps, attention=attention, mlp=experts, names=names)
        mlp, names = SharedMLP(build, size, inner, multiplier), {"mlp": "shared_mlp", "experts": "block_sparse_moe"}
        return Block(build, size, hyper.norm_eps, attention=attention, mlp=mlp, experts=experts, names=names)
