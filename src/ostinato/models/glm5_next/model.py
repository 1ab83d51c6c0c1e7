"""GLM-5.3 (model_type `glm5_next`), its text: KDA or latent attention to selected blocks, then an MLP or experts.

Each part reads a mix of the residual streams, and its result is mixed into them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.delta_net import KimiDeltaAttention
from ostinato.layers.hyper_connection import ManifoldHyperConnection, repeat_streams
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.layers.sparse_attention import SelectedLatentAttention
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.glm5_next.spec import Glm5NextHyperparameters
from ostinato.models.kimi_linear.model import SparseMLP
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.model import ModelSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs

NOT_RUN = re.compile(r"model\.visual\.|model\.(?:language_model\.)?layers\.\d+\.shared_head\.")
LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
OF_STREAMS = re.compile(r"\.hc_(attn|ffn)_(?=(?:fn|base|scale)$)")
EXPERTS = ("gate_proj", "up_proj", "down_proj")


class Glm5NextBlock(Module):
    """KDA or attention, then an MLP or experts, each after a norm of a mix of the streams."""

    def __init__(self, build: ModelBuilder, size: int, layer: LayerSpec, hyper: Glm5NextHyperparameters) -> None:
        super().__init__()
        self.names = {"mixer": "self_attn"}
        eps, how = hyper.norm_eps, (hyper.streams, hyper.norm_eps, hyper.stream_eps, hyper.iterations)
        self.attn_hc, self.ffn_hc = (ManifoldHyperConnection(build, size, *how) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(build, size, eps) for _ in range(2))
        self.mixer: KimiDeltaAttention | None = None
        self.self_attn: SelectedLatentAttention | None = None
        if isinstance(layer.mixer, GatedDeltaSpec):
            bound = hyper.decay_bound
            self.mixer = KimiDeltaAttention(build, size, layer.mixer, eps=eps, decay_bound=bound, has_flat_decay=True)
        else:
            assert layer.attention is not None, "a layer has attention or a delta net"
            self.self_attn = SelectedLatentAttention(
                build,
                size,
                layer.attention,
                hyper.latent,
                query_rank=hyper.query_rank,
                norm_eps=eps,
                bias=hyper.attention_bias,
            )
        self.mlp: Module
        if layer.experts is not None:
            self.mlp = SparseMLP(build, layer.experts, hyper, EXPERTS, clamp=hyper.clamp)
        else:
            self.mlp = GatedMLP(build, size, hyper.intermediate_size, clamp=hyper.clamp)

    def forward(self, x: Array, _: None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block without the choice of the layer before, [tokens, streams * hidden] both."""
        return self.run(x, None, inputs, memory)[0]

    def run(
        self, x: Array, selected: Array | None, inputs: StepInputs, memory: LayerCache
    ) -> tuple[Array, Array | None]:
        """Apply the block, [tokens, streams * hidden] both, and return the blocks that attention selected, if any.

        `selected` are those of the layer before.
        """
        mixed, weights = self.attn_hc.mix(x)
        y = self.input_layernorm(mixed)
        if self.self_attn is not None:
            y, selected = self.self_attn(y, selected, inputs, memory)
        else:
            assert self.mixer is not None, "a layer has attention or a delta net"
            y, selected = self.mixer(y, inputs, memory, None), None
        x = self.attn_hc.inject(x, y, weights)
        mixed, weights = self.ffn_hc.mix(x)
        return self.ffn_hc.inject(x, self.mlp(self.post_attention_layernorm(mixed), None), weights), selected


class Glm5NextBackbone(Backbone):
    """Embedding, which begins all streams, blocks, and a norm of the streams' mean."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec, *how: object) -> None:
        """Make the parts of a `Backbone`, which documents the arguments."""
        super().__init__(build, spec, *how)  # type: ignore[arg-type]
        self.ops, self.streams = build.ops, spec.num_streams
        self.stream_size *= self.streams
        self.shares = build.constant([1 / self.streams] * self.streams, "float32").reshape(1, self.streams)

    def transform(self, x: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the part of `forward` after the embedding, [tokens, hidden] -> [tokens, hidden]."""
        x, selected = repeat_streams(self.ops, x, self.streams), None
        for block, layer_memory in zip(self.layers, memory, strict=True):
            assert isinstance(block, Glm5NextBlock), "it is made by the model"
            x, selected = block.run(x, selected, inputs, layer_memory)
        return self.norm(self.ops.mix_streams(x, None, self.shares, self.streams))


class Glm5Next(CausalLM):
    """The language model."""

    backbone_type = Glm5NextBackbone

    def make_block(self, layer: LayerSpec) -> Glm5NextBlock:
        return Glm5NextBlock(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate a name; return None for a prediction head and an encoder, which are not run."""
        if NOT_RUN.match(name):
            return None
        name = name.replace("model.language_model.", "model.", 1)
        number = LAYER_NUMBER.match(name)
        if number is not None and int(number[1]) >= self.spec.hyperparameters.num_layers:
            return None
        if name.endswith(".index_kpool_compress_gate"):
            name += ".weight"
        return super().checkpoint_name(OF_STREAMS.sub(r".\1_hc.", name))
