"""Nemotron-H (model_type `nemotron_h`): blocks of one norm and one mixer each, in the pattern of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Linear
from ostinato.layers.mlp import MLP, Experts, SigmoidRouter
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import JOIN_NAMES, CausalLM, PredictionHead, mamba2_mixer
from ostinato.models.nemotron_h.spec import NemotronHHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, LayerCache, StepInputs


class MoE(Module):
    """Routed experts, in a latent space if the checkpoint has one, and one shared expert, plus the residual."""

    def __init__(self, build: ModelBuilder, hidden_size: int, hyper: NemotronHHyperparameters) -> None:
        super().__init__()
        moe = hyper.moe
        assert moe is not None
        self.gate = SigmoidRouter(build, hidden_size, moe)
        inner = moe.experts.size
        self.experts = Experts(build, moe.experts, hyper.mlp_activation)
        shared = (moe.shared_intermediate_size, hyper.mlp_activation, hyper.mlp_bias)
        self.shared_experts = MLP(build, hidden_size, *shared)
        self.latent = moe.latent_size is not None
        if self.latent:
            self.fc1_latent_proj = Linear(build, hidden_size, inner, hyper.mlp_bias)
            self.fc2_latent_proj = Linear(build, inner, hidden_size, hyper.mlp_bias)

    def forward(self, x: Array, residual: Array) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        choices = self.gate(x)
        shared = self.shared_experts(x, residual)
        if self.latent:
            return self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), choices), shared)
        return self.experts(x, choices, shared)


class Block(Module):
    """x + mixer(norm(x)). Attention leaves out keys before position `first_key`."""

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        layer: LayerSpec,
        hyper: NemotronHHyperparameters,
        first_key: int = 0,
    ) -> None:
        super().__init__()
        self.kind = layer.kind
        self.norm = RMSNorm(build, hidden_size, hyper.norm_eps)
        if isinstance(layer.mixer, Mamba2Spec):
            self.mixer: Module = mamba2_mixer(build, hidden_size, layer.mixer, hyper)
        elif layer.attention is not None:
            self.mixer = Attention(build, hidden_size, layer.attention, first_key=first_key)
        elif layer.experts is not None:
            self.mixer = MoE(build, hidden_size, hyper)
        else:
            self.mixer = MLP(build, hidden_size, hyper.intermediate_size, hyper.mlp_activation, hyper.mlp_bias)

    def forward(self, x: Array, angles: None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the layer, [tokens, hidden] -> [tokens, hidden]."""
        y = self.norm(x)
        if self.kind == "mamba2":
            return self.mixer(y, inputs, memory, x)
        if self.kind == "attention":
            return self.mixer(y, angles, inputs, memory, x)
        return self.mixer(y, x)

    def store_keys(self, x: Array, _: None, inputs: StepInputs, memory: LayerCache) -> None:
        """Write the keys and values of attention without computing the block."""
        assert isinstance(self.mixer, Attention), "only blocks with attention have keys"
        self.mixer.store(self.norm(x), inputs, memory)


class NemotronH(CausalLM):
    """The language model, with its prediction head if that makes drafts."""

    backbone_names = (("embed_tokens", "embeddings"), ("norm", "norm_f"))

    def make_block(self, layer: LayerSpec, first_key: int = 0) -> Block:
        """Make a block whose attention sees no key before position `first_key`."""
        return Block(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters, first_key)

    def make_head(self, layers: Sequence[LayerSpec]) -> PredictionHead:
        # In the checkpoint the first block has the join's weights, and the last one the final norm.
        names = {name: f"layers.0.{stored}" for name, stored in JOIN_NAMES.items()}
        names |= {"blocks": "layers", "norm": f"layers.{len(layers) - 1}.final_layernorm"}
        return PredictionHead(self.build, self.spec, layers, self.make_block, names=names)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate the backbone's second name; return None for tensors of a prediction head that is not used."""
        if name.startswith("mtp."):
            return None if self.mtp is None else name
        if name.startswith("backbone."):
            name = "model." + name.removeprefix("backbone.")
        return super().checkpoint_name(name)
