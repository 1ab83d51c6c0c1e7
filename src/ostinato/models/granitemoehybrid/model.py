"""Granite 4 (model_type `granitemoehybrid`): a mixer, then a shared MLP and experts; four multipliers."""

from __future__ import annotations

from typing import Any

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Linear
from ostinato.layers.mlp import RoutedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.base import Block, CausalLM, mamba2_mixer
from ostinato.models.granitemoehybrid.spec import GraniteMoeHybridHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec

STACKS = ("input_linear.weight", "output_linear.weight")
NAMES = {"mlp": "shared_mlp", "experts": "block_sparse_moe"}


class SharedMLP(Module):
    """Gated MLP for every token, times `multiplier`, plus the residual; a checkpoint has gate and up as one tensor."""

    def __init__(self, build: ModelBuilder, hidden_size: int, intermediate_size: int, multiplier: float) -> None:
        super().__init__()
        self.input_linear = Linear(build, hidden_size, 2 * intermediate_size, segments=(intermediate_size,) * 2)
        self.output_linear = Linear(build, intermediate_size, hidden_size, multiplier=multiplier, cuts_inputs=True)

    def forward(self, x: Array, residual: Array) -> Array:
        """Apply the MLP to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.output_linear(self.input_linear(x, activation="swiglu"), residual)


class Granite(CausalLM):
    """A language model with four multipliers; an architecture adds its blocks."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper = spec.hyperparameters
        super().__init__(
            build, spec, embedding_multiplier=hyper.embedding_multiplier, logits_multiplier=1.0 / hyper.logits_scaling
        )

    def make_attention(self, spec: AttentionSpec) -> Attention:
        """Make the attention of a block."""
        hyper = self.spec.hyperparameters
        return Attention(
            self.build,
            self.spec.hidden_size,
            spec,
            bias=hyper.attention_bias,
            scale=hyper.attention_multiplier,
            out_multiplier=hyper.residual_multiplier,
        )


class GraniteMoeHybrid(Granite):
    """The language model."""

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: GraniteMoeHybridHyperparameters = self.spec.hyperparameters
        multiplier, shared_size = hyper.residual_multiplier, hyper.shared_intermediate_size
        experts = None
        if layer.experts is not None:
            experts = RoutedMLP(build, layer.experts, scaling=multiplier, router="router.layer", stacked_as=STACKS)
            experts.experts.is_in_checkpoint = False
        mixer = None
        if isinstance(layer.mixer, Mamba2Spec):
            mixer = mamba2_mixer(build, size, layer.mixer, hyper, out_multiplier=multiplier)
        parts: dict[str, Any] = {"mlp": experts, "names": {"mlp": NAMES["experts"]}}
        if shared_size or experts is None:
            mlp = SharedMLP(build, size, shared_size, multiplier)
            parts = {"mlp": mlp, "experts": experts, "names": NAMES}
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=None if layer.attention is None else self.make_attention(layer.attention),
            mixer=mixer,
            **parts,
        )
