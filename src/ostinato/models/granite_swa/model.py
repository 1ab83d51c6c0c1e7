"""Granite with windows (model_type `granite_swa`, and with experts `granitemoe_swa`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.attention import Attention, Rotary
from ostinato.layers.mlp import Experts, GatedMLP
from ostinato.layers.module import ModelBuilder, Module, ModuleList
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.decoder import Block
from ostinato.models.granite_swa.spec import GraniteSwaHyperparameters
from ostinato.models.granitemoehybrid.model import SharedMLP, SoftmaxRouter
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs


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


class GraniteSwaBackbone(Backbone):
    """Embedding, blocks and final norm, with the angles of several rotary embeddings."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: GraniteSwaHyperparameters = spec.hyperparameters
        super().__init__(
            build,
            spec,
            lambda layer: make_block(build, spec.hidden_size, layer, hyper),
            hyper.norm_eps,
            embedding_multiplier=hyper.embedding_multiplier,
        )
        self.others = ModuleList(Rotary(build, rope) for rope in hyper.ropes[1:])

    def forward(self, step: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the final normed hidden states of a step, [tokens, hidden]."""
        x = self.embed_tokens(step.token_ids)
        rotaries = [] if self.rotary is None else [self.rotary, *self.others]
        angles = [rotary(step.positions) for rotary in rotaries]
        for block, layer_memory in zip(self.layers, memory, strict=True):
            assert isinstance(block, Block), "its blocks are those of this file"
            assert isinstance(block.self_attn, Attention), "every layer has attention"
            x = block(x, angles[block.self_attn.spec.rope] if angles else None, step, layer_memory)
        return self.norm(x)


def make_block(build: ModelBuilder, size: int, layer: LayerSpec, hyper: GraniteSwaHyperparameters) -> Block:
    """Make a block of attention and an MLP, or of experts and, if there is one, a shared MLP."""
    assert layer.attention is not None, "every layer has attention"
    multiplier, inner = hyper.residual_multiplier, hyper.intermediate_size
    attention = Attention(
        build,
        size,
        layer.attention,
        bias=hyper.attention_bias,
        scale=hyper.attention_multiplier,
        out_multiplier=multiplier,
    )
    if layer.experts is None:
        gated = GatedMLP(build, size, inner, hyper.mlp_bias, down_multiplier=multiplier)
        return Block(build, size, hyper.norm_eps, attention=attention, mlp=gated)
    experts = MoE(build, layer.experts, multiplier)
    if not inner:
        names = {"mlp": "block_sparse_moe"}
        return Block(build, size, hyper.norm_eps, attention=attention, mlp=experts, names=names)
    mlp, names = SharedMLP(build, size, inner, multiplier), {"mlp": "shared_mlp", "experts": "block_sparse_moe"}
    return Block(build, size, hyper.norm_eps, attention=attention, mlp=mlp, experts=experts, names=names)


class GraniteSwa(CausalLM):
    """The language model."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: GraniteSwaHyperparameters = spec.hyperparameters
        super().__init__(build, spec, logits_multiplier=1.0 / hyper.logits_scaling)
        self.model = GraniteSwaBackbone(build, spec)

    @property
    def backbone(self) -> Backbone:
        return self.model

    def forward(self, step: StepInputs, memory: Sequence[LayerCache]) -> Array:
        return self.model(step, memory)
