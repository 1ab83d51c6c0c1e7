"""Llama and the models that differ from it in values of its spec: attention, and a gated MLP or experts."""

from __future__ import annotations

import math
from functools import cached_property

from ostinato.errors import ModelError
from ostinato.layers.attention import Attention
from ostinato.layers.mlp import STACKED, GatedMLP, RoutedMLP
from ostinato.layers.module import ModelBuilder
from ostinato.layers.norm import LayerNorm
from ostinato.models.base import Block, CausalLM, ParallelBlock, PostNormBlock
from ostinato.models.config_json import MAX_SIZE
from ostinato.models.llama.spec import LlamaHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

PADDED = 1024
"""More than the positions that padding of drafts may have beyond the longest request."""


def query_scales(beta: float, length: int, positions: int) -> list[float]:
    """Return 1 + beta ln(1 + floor(p / length)) for each position p (Llama 4's temperature)."""
    spans = [1 + beta * math.log(1 + i) for i in range(-(-positions // length))]
    return [spans[position // length] for position in range(positions)]


class Llama(CausalLM):
    """The language model."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: LlamaHyperparameters = spec.hyperparameters
        super().__init__(
            build,
            spec,
            embedding_multiplier=hyper.embedding_multiplier,
            logits_multiplier=hyper.logits_multiplier,
            final_norm=LayerNorm(build, spec.hidden_size, hyper.norm_eps, has_bias=False)
            if hyper.is_parallel
            else None,
        )

    @cached_property
    def query_scales(self) -> Array | None:
        """Factors of queries by position, [positions, 1], for as many positions as a request may have."""
        spec = self.spec
        growth, rope = spec.hyperparameters.query_growth, spec.rope
        if growth is None or rope is None:
            return None
        scaled = int(rope.parameters.get("factor", 1.0) * rope.original_max_position)
        (beta, length), longest = growth, max(spec.max_position_embeddings or 0, scaled) + PADDED
        if longest > MAX_SIZE:
            raise ModelError(
                f"config.json has queries that grow over {longest:,} positions; at most {MAX_SIZE:,} are read"
            )
        return self.build.constant(query_scales(beta, length, longest), self.build.dtype).reshape(-1, 1)

    def make_block(self, layer: LayerSpec) -> Block | PostNormBlock | ParallelBlock:
        build, size = self.build, self.spec.hidden_size
        hyper: LlamaHyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        attention = Attention(
            build,
            size,
            layer.attention,
            bias=hyper.qkv_bias,
            out_bias=hyper.out_bias,
            qk_norm_eps=None if hyper.qk_norms is None else hyper.norm_eps,
            qk_norm_whole=hyper.qk_norms == "of_all",
            scale=hyper.attention_multiplier,
            out_multiplier=hyper.residual_multiplier,
            has_neighbours=hyper.has_neighbours,
            is_one_tensor=hyper.has_packed_tensors,
            query_scales=self.query_scales,
        )
        if hyper.norms_results:
            return PostNormBlock(build, size, hyper.norm_eps, attention=attention, mlp=self.make_mlp(layer))
        if hyper.is_parallel:
            return ParallelBlock(build, size, hyper.norm_eps, attention=attention, mlp=self.make_mlp(layer))
        names = {"mlp": hyper.experts_in} if layer.experts is not None else {}
        return Block(build, size, hyper.norm_eps, attention=attention, mlp=self.make_mlp(layer), names=names)

    def checkpoint_name(self, name: str) -> str | None:
        """Leave out the tensors that are not read."""
        unread = self.spec.hyperparameters.unread
        return None if unread and name.startswith(unread) else super().checkpoint_name(name)

    def make_mlp(self, layer: LayerSpec) -> GatedMLP | RoutedMLP:
        """Make the MLP of a block, or its experts."""
        hyper: LlamaHyperparameters = self.spec.hyperparameters
        if layer.experts is None:
            return GatedMLP(
                self.build,
                self.spec.hidden_size,
                hyper.intermediate_size,
                hyper.mlp_bias,
                down_multiplier=hyper.residual_multiplier,
                is_one_tensor=hyper.has_packed_tensors,
            )
        return RoutedMLP(
            self.build,
            layer.experts,
            hyper.normalizes,
            names=hyper.expert_names,
            stacked_as=STACKED,
            may_be_stacked=True,
        )
