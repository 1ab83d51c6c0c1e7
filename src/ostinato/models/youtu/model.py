"""Youtu-LLM (model_type `youtu`): latent attention with positions, then a gated MLP."""

from __future__ import annotations

from ostinato.layers.latent_attention import LatentAttention
from ostinato.layers.mlp import GatedMLP
from ostinato.models.base import Block, CausalLM
from ostinato.models.kimi_linear.spec import score_scale
from ostinato.models.youtu.spec import YoutuHyperparameters
from ostinato.plan.layer_specs import LayerSpec


class Youtu(CausalLM):
    """The language model."""

    def make_block(self, layer: LayerSpec) -> Block:
        hyper: YoutuHyperparameters = self.spec.hyperparameters
        build, size = self.build, self.spec.hidden_size
        assert layer.attention is not None, "every layer has attention"
        attention = LatentAttention(
            build,
            size,
            layer.attention,
            hyper.latent,
            query_rank=hyper.query_rank,
            has_neighbours=hyper.has_neighbours,
            score_scale=score_scale(self.spec.rope),
        )
        return Block(
            build, size, hyper.norm_eps, mlp=GatedMLP(build, size, hyper.intermediate_size), attention=attention
        )
