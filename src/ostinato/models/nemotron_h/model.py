"""Nemotron-H (model_type `nemotron_h`): blocks of one norm and one mixer each, in the pattern of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.attention import Attention
from ostinato.layers.linear import Linear
from ostinato.layers.mlp import MLP, Experts, SigmoidRouter
from ostinato.layers.module import ModelBuilder, Module, ModuleList
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import PredictionHead
from ostinato.models.decoder import Decoder, mamba2_mixer
from ostinato.models.nemotron_h.spec import NemotronHHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec

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


class Join(Module):
    """Join of a token and the hidden state before it into one vector."""

    def __init__(self, build: ModelBuilder, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.concat = build.ops.concat
        self.enorm = RMSNorm(build, hidden_size, norm_eps)
        self.hnorm = RMSNorm(build, hidden_size, norm_eps)
        self.eh_proj = Linear(build, 2 * hidden_size, hidden_size)

    def forward(self, hidden: Array, embedded: Array) -> Array:
        """Join `hidden` and `embedded`, both [tokens, hidden] -> [tokens, hidden]."""
        return self.eh_proj(self.concat(self.enorm(embedded), self.hnorm(hidden)))


class Head(PredictionHead):
    """Multi-token prediction head; its blocks have attention without positions, an MLP or experts."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec, layers: Sequence[LayerSpec]) -> None:
        super().__init__(build)
        hyper: NemotronHHyperparameters = spec.hyperparameters
        size, last = spec.hidden_size, len(layers) - 1
        # In the checkpoint the first block has the join's weights, and the last one the final norm.
        self.names = {"join": "layers.0", "blocks": "layers", "final_layernorm": f"layers.{last}.final_layernorm"}
        self.join = Join(build, size, hyper.norm_eps)
        self.blocks = ModuleList(Block(build, size, layer, hyper, first_key=1) for layer in layers)
        self.final_layernorm = RMSNorm(build, size, hyper.norm_eps)
        self.last_attention = max((i for i, layer in enumerate(layers) if layer.attention is not None), default=-1)

    def forward(self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        x = self.join(hidden, embedded)
        for block, layer_memory in zip(self.blocks, memory, strict=False):
            x = block(x, None, inputs, layer_memory)
        return self.final_layernorm(x)

    def update_head_cache(
        self, hidden: Array, embedded: Array, inputs: StepInputs, memory: Sequence[LayerCache]
    ) -> None:
        previous = self.previous_hidden(hidden, inputs, memory[-1])
        if self.last_attention < 0:
            return
        x = self.join(previous, embedded)
        for block, layer_memory in zip(self.blocks[: self.last_attention], memory, strict=False):
            x = block(x, None, inputs, layer_memory)
        block = self.blocks[self.last_attention]
        assert isinstance(block.mixer, Attention), "it was found by its kind"
        block.mixer.store(block.norm(x), inputs, memory[self.last_attention])


class NemotronH(Decoder):
    """The language model, with its prediction head if that makes drafts."""

    backbone_names = (("embed_tokens", "embeddings"), ("norm", "norm_f"))

    def make_block(self, layer: LayerSpec) -> Block:
        return Block(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters)

    def make_head(self, layers: Sequence[LayerSpec]) -> Head:
        return Head(self.build, self.spec, layers)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate the backbone's second name; return None for tensors of a prediction head that is not used."""
        if name.startswith("mtp."):
            return None if self.mtp is None else name
        if name.startswith("backbone."):
            name = "model." + name.removeprefix("backbone.")
        return super().checkpoint_name(name)
