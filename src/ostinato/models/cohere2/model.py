"""Cohere 2 (model_type `cohere2`): attention and a gated MLP of one norm, both added to the residual stream."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import LayerNorm
from ostinato.models.decoder import Decoder
from ostinato.models.llama.spec import LlamaHyperparameters
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.model import ModelSpec


class ParallelBlock(Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, build: ModelBuilder, size: int, spec: AttentionSpec, hyper: LlamaHyperparameters) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(build, size, hyper.norm_eps, has_bias=False)
        self.self_attn = Attention(build, size, spec, bias=hyper.qkv_bias, has_neighbours=hyper.has_neighbours)
        self.mlp = GatedMLP(build, size, hyper.intermediate_size)

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        y = self.input_layernorm(x)
        return self.mlp(y, self.self_attn(y, angles, inputs, memory, x))


class Cohere2(Decoder):
    """The language model."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: LlamaHyperparameters = spec.hyperparameters
        norm = LayerNorm(build, spec.hidden_size, hyper.norm_eps, has_bias=False)
        super().__init__(build, spec, logits_multiplier=hyper.logits_multiplier, final_norm=norm)

    def make_block(self, layer: LayerSpec) -> ParallelBlock:
        assert layer.attention is not None, "every layer has attention"
        return ParallelBlock(self.build, self.spec.hidden_size, layer.attention, self.spec.hyperparameters)
