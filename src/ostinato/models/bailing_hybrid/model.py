"""Ling 3.0 (model_type `bailing_hybrid`): KDA or gated latent attention, then a gated MLP or experts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ostinato.layers.delta_net import KimiDeltaAttention
from ostinato.layers.latent_attention import LatentAttention
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.bailing_hybrid.spec import BailingHybridHyperparameters
from ostinato.models.base import JOIN_NAMES, Block, CausalLM, PredictionHead
from ostinato.models.kimi_linear.model import SparseMLP
from ostinato.models.kimi_linear.spec import score_scale
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.model import ModelSpec

EXPERTS = ("gate_proj", "up_proj", "down_proj")
ROUTER_BIAS = "expert_bias"

LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
HEAD_NORM = re.compile(r"\.(shared_head\.norm|post_norm)\.")
"""Other names of a head's last norm, which transformers takes."""
HEAD_COPIES = (".embed_tokens.weight", ".word_embeddings.weight", ".shared_head.head.weight")
"""Ends of the names of a head's copies of the model's embedding and LM head."""


class BailingHybrid(CausalLM):
    """The language model, with its prediction head if that makes drafts."""

    backbone_names = (("embed_tokens", "word_embeddings"),)

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.names = {"mtp": "model.layers"}

    def make_block(self, layer: LayerSpec, first_key: int = 0) -> Block:
        """Make a block whose attention sees no key before position `first_key`."""
        hyper: BailingHybridHyperparameters = self.spec.hyperparameters
        build, size, eps = self.build, self.spec.hidden_size, hyper.norm_eps
        mixer, attention = None, None
        if isinstance(layer.mixer, GatedDeltaSpec):
            mixer = KimiDeltaAttention(build, size, layer.mixer, eps=eps, low_rank=False, decay_bound=hyper.decay_bound)
            mixer.names["out_proj"] = "dense"
        elif layer.attention is not None:
            attention = LatentAttention(
                build,
                size,
                layer.attention,
                hyper.latent,
                has_neighbours=True,
                has_head_gates=True,
                first_key=first_key,
                score_scale=score_scale(self.spec.rope),
            )
            attention.names = {"o_proj": "dense", "gate_proj": "g_proj"}
        mlp: Module
        if layer.experts is not None:
            mlp = SparseMLP(build, layer.experts, hyper, EXPERTS, ROUTER_BIAS)
        else:
            mlp = GatedMLP(build, size, hyper.intermediate_size)
        names = {"mixer": "attention", "self_attn": "attention"}
        return Block(build, size, eps, mlp=mlp, attention=attention, mixer=mixer, names=names)

    def make_head(self, layers: Sequence[LayerSpec]) -> PredictionHead:
        hyper: BailingHybridHyperparameters = self.spec.hyperparameters
        number = hyper.num_layers
        names = {name: f"{number}.{stored}" for name, stored in {**JOIN_NAMES, "norm": "final_layernorm"}.items()}
        names["blocks"] = ""
        return PredictionHead(self.build, self.spec, layers, self.make_block, names=names, first=number)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate a name; return None for tensors of a prediction head that is not used, and for its copies."""
        number = LAYER_NUMBER.match(name)
        if number is not None and int(number[1]) >= self.spec.hyperparameters.num_layers:
            if self.mtp is None or name.endswith(HEAD_COPIES):
                return None
            name = HEAD_NORM.sub(".final_layernorm.", name)
        return super().checkpoint_name(name)
