"""LFM2 (model_types `lfm2`, `lfm2_moe`): a short convolution or attention, then a gated MLP or experts."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.conv import ShortConv
from ostinato.layers.linear import Linear
from ostinato.layers.mlp import Experts, GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.base import Block, CausalLM
from ostinato.models.lfm2.spec import Lfm2Hyperparameters, Lfm2MoeHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.mixers import ShortConvSpec

NAMES = {
    "input_layernorm": "operator_norm",
    "mixer": "conv",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "feed_forward",
}
MIN_SUM = 1e-6
"""Number added to the sum of the chosen experts' weights, by which they are divided."""

ATTENTION_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}


class Lfm2(CausalLM):
    """The language model."""

    backbone_names = (("norm", "embedding_norm"),)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size, attention, conv = self.build, self.spec.hidden_size, None, None
        hyper: Lfm2Hyperparameters = self.spec.hyperparameters
        if layer.attention is not None:
            attention = Attention(build, size, layer.attention, qk_norm_eps=hyper.norm_eps)
            attention.names = ATTENTION_NAMES
        if isinstance(layer.mixer, ShortConvSpec):
            conv = ShortConv(build, size, layer.mixer, bias=hyper.conv_bias)
        return Block(
            build, size, hyper.norm_eps, attention=attention, mixer=conv, mlp=self.make_mlp(layer), names=NAMES
        )

    def make_mlp(self, _: LayerSpec) -> Module:
        """Make the MLP of a block."""
        size = self.spec.hyperparameters.intermediate_size
        return GatedMLP(self.build, self.spec.hidden_size, size, names=("w1", "w3", "w2"))


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
    """The language model with experts (LFM2-MoE)."""

    def make_mlp(self, layer: LayerSpec) -> Module:
        if layer.experts is None:
            return super().make_mlp(layer)
        return SparseMLP(self.build, layer.experts, self.spec.hyperparameters)
