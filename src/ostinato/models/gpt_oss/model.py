"""gpt-oss (model_type `gpt_oss`): attention with sinks, experts with biases, also in their router."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import STACKED, Experts
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.base import Block, CausalLM
from ostinato.models.gpt_oss.spec import GptOssHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec


class Router(Module):
    """Router with a bias. The weights are the softmax over the chosen scores."""

    def __init__(self, build: ModelBuilder, experts: ExpertsSpec) -> None:
        super().__init__()
        self.op, self.top_k = build.ops.route, experts.top_k
        self.weight = self.declare(build, "weight", experts.num_experts, experts.size, role="router")
        self.bias = self.declare(build, "bias", experts.num_experts, role="bias", in_float32=True)

    def forward(self, x: Array) -> Array:
        """Return the ids of experts and their weights, [tokens, hidden] -> [tokens, 2, top_k]."""
        return self.op(x, self.weight, None, self.top_k, bias=self.bias)


class MoE(Module):
    """Routed experts, plus the residual."""

    def __init__(self, build: ModelBuilder, spec: ExpertsSpec, clamp: tuple[float, float, float]) -> None:
        super().__init__()
        self.router = Router(build, spec)
        self.experts = Experts(build, spec, "swiglu", stacked_as=STACKED, bias=True, clamp=clamp)

    def forward(self, x: Array, residual: Array) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.experts(x, self.router(x), residual)


class GptOss(CausalLM):
    """The language model."""

    transposed = (".experts.gate_up_proj", ".experts.down_proj")
    in_turns = (".experts.gate_up_proj", ".experts.gate_up_proj_bias")

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: GptOssHyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        assert layer.experts is not None, "every layer has experts"
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=Attention(build, size, layer.attention, bias=hyper.attention_bias),
            mlp=MoE(build, layer.experts, hyper.clamp),
        )
