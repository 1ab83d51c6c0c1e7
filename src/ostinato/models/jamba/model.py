"""Jamba (model_type `jamba`): a Mamba-1 mixer or attention without positions, then a gated MLP or experts."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Linear
from ostinato.layers.mamba1 import Mamba1Mixer
from ostinato.layers.mlp import Experts, GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.decoder import Block, Decoder
from ostinato.models.jamba.spec import JambaHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.mixers import Mamba1Spec

NAMES = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}


class MoE(Module):
    """Experts of a router, weighted by a softmax over all experts, plus the residual."""

    def __init__(self, build: ModelBuilder, spec: ExpertsSpec) -> None:
        super().__init__()
        self.op, self.top_k = build.ops.route, spec.top_k
        self.router = Linear(build, spec.size, spec.num_experts, role="router")
        self.experts = Experts(build, spec, "swiglu")

    def forward(self, x: Array, residual: Array) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.experts(x, self.op(x, self.router.weight, None, self.top_k, softmax_over_all=True), residual)


class Jamba(Decoder):
    """The language model."""

    backbone_names = (("norm", "final_layernorm"),)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: JambaHyperparameters = self.spec.hyperparameters
        experts = layer.experts
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=None if layer.attention is None else Attention(build, size, layer.attention),
            mixer=self._mamba(layer.mixer, hyper) if isinstance(layer.mixer, Mamba1Spec) else None,
            mlp=GatedMLP(build, size, hyper.intermediate_size) if experts is None else MoE(build, experts),
            names=NAMES,
        )

    def _mamba(self, spec: Mamba1Spec, hyper: JambaHyperparameters) -> Mamba1Mixer:
        return Mamba1Mixer(
            self.build,
            self.spec.hidden_size,
            spec,
            inner_norms="weighted",
            eps=hyper.norm_eps,
            bias=hyper.mamba_proj_bias,
            conv_bias=hyper.conv_bias,
        )
