"""Granite with windows (model_type `granite_swa`, and with experts `granitemoe_swa`)."""

from __future__ import annotations

from ostinato.layers.mlp import STACKED, GatedMLP, RoutedMLP
from ostinato.models.base import Block
from ostinato.models.granite_swa.spec import GraniteSwaHyperparameters
from ostinato.models.granitemoehybrid.model import Granite, SharedMLP
from ostinato.plan.layer_specs import LayerSpec


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
        experts = RoutedMLP(build, layer.experts, scaling=multiplier, router="router", stacked_as=STACKED)
        if not inner:
            names = {"mlp": "block_sparse_moe"}
            return Block(build, size, hyper.norm_eps, attention=attention, mlp=experts, names=names)
        mlp, names = SharedMLP(build, size, inner, multiplier), {"mlp": "shared_mlp", "experts": "block_sparse_moe"}
        return Block(build, size, hyper.norm_eps, attention=attention, mlp=mlp, experts=experts, names=names)
