"""Qwen4, its text model (model_type `qwen4_exp_text`): delta nets, attention and experts on streams of residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.delta_net import GatedDeltaNet
from ostinato.layers.hyper_connection import HyperConnection, repeat_streams
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.ngram import NgramLayer
from ostinato.layers.sparse_attention import IndexedAttention
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.qwen3_next.model import SparseMLP
from ostinato.models.qwen4_exp_text.spec import Qwen4Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec, NgramDeltaSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs


class StreamBlock(Module):
    """An n-gram embedding, if the layer has one, then attention or a delta net, then experts, each on all streams."""

    def __init__(
        self, build: ModelBuilder, size: int, layer: LayerSpec, hyper: Qwen4Hyperparameters, rope: RopeSpec | None
    ) -> None:
        super().__init__()
        self.names = {"mixer": "linear_attn"}
        eps, mixer = hyper.norm_eps, layer.mixer
        self.ple = NgramLayer(build, mixer.ngrams, eps) if isinstance(mixer, NgramDeltaSpec) else None
        self.attn_hyper_connection, self.mlp_hyper_connection = (
            HyperConnection(build, size, hyper.streams, hyper.rank, eps) for _ in range(2)
        )
        self.self_attn: IndexedAttention | None = None
        self.mixer: GatedDeltaNet | None = None
        if layer.attention is not None:
            assert rope is not None, "queries and keys are rotated"
            facts = {"qk_norm_eps": eps, "qk_norm_plus_one": True, "is_gated": True, "bias": hyper.attention_bias}
            self.self_attn = IndexedAttention(build, size, layer.attention, rope, eps, **facts)
        if isinstance(mixer, GatedDeltaSpec):
            self.mixer = GatedDeltaNet(build, size, mixer, eps=eps, gate_is_sigmoid=hyper.gate_is_sigmoid)
        assert layer.experts is not None, "every layer has experts"
        self.mlp = SparseMLP(build, layer.experts, hyper.shared_size, hyper.normalizes)

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, streams * hidden] -> [tokens, streams * hidden]."""
        if self.ple is not None:
            x = self.ple(x, inputs, memory)
        mixed, normed = self.attn_hyper_connection.mix(x)
        if self.mixer is not None:
            y = self.mixer(mixed, inputs, memory, None)
        else:
            assert self.self_attn is not None, "a layer has attention or a delta net"
            y = self.self_attn(mixed, angles, inputs, memory, None)
        x = self.attn_hyper_connection.inject(x, y, normed)
        mixed, normed = self.mlp_hyper_connection.mix(x)
        return self.mlp_hyper_connection.inject(x, self.mlp(mixed, None), normed)


class StreamBackbone(Backbone):
    """Embedding, which begins all streams, blocks, and a mix of the streams in place of a norm."""

    def transform(self, x: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the part of `forward` after the embedding, [tokens, hidden] -> [tokens, hidden]."""
        mixer = self.norm
        assert isinstance(mixer, HyperConnection), "it is made by the model"
        return super().transform(repeat_streams(mixer.ops, x, mixer.streams), inputs, memory)


class Qwen4(CausalLM):
    """The language model. All norms but those of delta nets are stored less 1."""

    backbone_type = StreamBackbone
    backbone_names = (("norm", "hyper_connection_mixer"),)

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: Qwen4Hyperparameters = spec.hyperparameters
        mixer = HyperConnection(build, spec.hidden_size, hyper.streams, hyper.rank, hyper.norm_eps, injects=False)
        super().__init__(build, spec, final_norm=mixer)
        self.model.stream_size *= hyper.streams
        self.derived = {
            f"{prefix}layers.{number}.ple.ple_embedding.{kind}": getattr(layer.mixer.ngrams, attribute)
            for prefix in ("model.", "model.language_model.")
            for number, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, NgramDeltaSpec)
            for kind, attribute in DERIVED.items()
        }

    def make_block(self, layer: LayerSpec) -> StreamBlock:
        return StreamBlock(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters, self.spec.rope)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate a name; return None for a prediction head and an encoder, which are not run."""
        if name.startswith(("mtp.", "model.visual.")) or name in self.derived:
            return None
        return super().checkpoint_name(name.replace("model.language_model.", "model.", 1))


DERIVED = {"layer_multipliers": "multipliers", "ngram_heads_vocab_sizes": "sizes", "ngram_heads_offsets": "starts"}
"""Last parts of names of tensors whose values follow from config.json -> attributes of `NgramSpec` with them."""
