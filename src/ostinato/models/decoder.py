"""Shared parts of plain decoders: blocks of a mixer and an MLP, and the forward pass through them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from ostinato.layers.attention import Attention
from ostinato.layers.hyper_connection import HyperConnection
from ostinato.layers.latent_attention import LatentAttention
from ostinato.layers.mamba import Mamba2Mixer
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import LayerNorm, PlainRMSNorm, RMSNorm
from ostinato.models.base import Backbone, CausalLM, HiddenStateKeeper, PredictionHead
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec


class Block(Module):
    """Attention, a state mixer or both, then an MLP, experts or both.

    Each part of a pair works on one norm of the residual stream and is added to it. `names` are the checkpoint's for
    the attributes, if they differ; a mixer is called `mamba` without an entry. With `norm_plus_one` the checkpoint
    stores the norms less 1.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        norm_eps: float,
        *,
        mlp: Module,
        attention: Attention | LatentAttention | None = None,
        mixer: Module | None = None,
        experts: Module | None = None,
        names: dict[str, str] | None = None,
        norm_plus_one: bool = False,
    ) -> None:
        super().__init__()
        self.names = {"mixer": "mamba", **(names or {})}
        self.input_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)
        self.self_attn = attention
        self.mixer = mixer
        self.post_attention_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)
        self.mlp = mlp
        self.experts = experts

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        y = self.input_layernorm(x)
        if self.mixer is not None:
            x = self.mixer(y, inputs, memory, x)
        if self.self_attn is not None:
            x = self.self_attn(y, angles, inputs, memory, x)
        y = self.post_attention_layernorm(x)
        x = self.mlp(y, x)
        return x if self.experts is None else self.experts(y, x)

    def store_keys(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> None:
        """Write the keys and values of attention without computing the block."""
        assert self.self_attn is not None, "only blocks with attention have keys"
        self.self_attn.store(self.input_layernorm(x), inputs, memory, angles)


class SandwichBlock(Block):
    """Attention or a state mixer, then an MLP. Each has a norm before it, and another one between it and the sum."""

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        norm_eps: float,
        *,
        norm_plus_one: bool = False,
        **parts: Any,
    ) -> None:
        """Make the norms around the `parts` of a `Block`, which documents the arguments."""
        super().__init__(build, hidden_size, norm_eps, norm_plus_one=norm_plus_one, **parts)
        self.pre_feedforward_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)
        self.post_feedforward_layernorm = RMSNorm(build, hidden_size, norm_eps, norm_plus_one)

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        y = self.input_layernorm(x)
        if self.self_attn is not None:
            y = self.self_attn(y, angles, inputs, memory, None)
        if self.mixer is not None:
            y = self.mixer(y, inputs, memory, None)
        x = self.post_attention_layernorm(y, x)
        return self.post_feedforward_layernorm(self.feed_forward(x), x)

    def feed_forward(self, x: Array) -> Array:
        """Return the MLP's result before its last norm, [tokens, hidden] -> [tokens, hidden]."""
        return self.mlp(self.pre_feedforward_layernorm(x), None)


class PostNormBlock(Module):
    """x + norm(attention(x)), and the same with an MLP (OLMo)."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, norm_eps: float, *, attention: Attention, mlp: Module
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, hidden_size, norm_eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(build, hidden_size, norm_eps)

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        x = self.post_attention_layernorm(self.self_attn(x, angles, inputs, memory, None), residual=x)
        return self.post_feedforward_layernorm(self.mlp(x, None), residual=x)


class ParallelBlock(Module):
    """x + attention(norm(x)) + mlp(norm(x)), with a layer norm (Cohere)."""

    def __init__(
        self, build: ModelBuilder, hidden_size: int, norm_eps: float, *, attention: Attention, mlp: Module
    ) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(build, hidden_size, norm_eps, has_bias=False)
        self.self_attn = attention
        self.mlp = mlp

    def forward(self, x: Array, angles: Array | None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden]."""
        y = self.input_layernorm(x)
        return self.mlp(y, self.self_attn(y, angles, inputs, memory, x))


class MixerBlock(Module):
    """x + mixer(norm(x)), the whole layer of a pure state-space model."""

    def __init__(self, build: ModelBuilder, hidden_size: int, norm_eps: float, mixer: Module) -> None:
        super().__init__()
        self.norm = RMSNorm(build, hidden_size, norm_eps)
        self.mixer = mixer

    def forward(self, x: Array, _: None, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the block, [tokens, hidden] -> [tokens, hidden] in the dtype of the residual stream.

        A norm rounds the stream to the model's dtype; the sum is in the dtype of the stream.
        """
        return self.mixer(self.norm(x), inputs, memory, x)


def mamba2_mixer(build: ModelBuilder, size: int, spec: Mamba2Spec, hyper: Any, **further: Any) -> Mamba2Mixer:
    """Make a mixer with the biases, limits and epsilon of hyperparameters such as `HybridHyperparameters`."""
    return Mamba2Mixer(
        build,
        size,
        spec,
        eps=hyper.norm_eps,
        proj_bias=hyper.mamba_proj_bias,
        conv_bias=hyper.conv_bias,
        dt_limit=hyper.dt_limit,
        **further,
    )


class Decoder(CausalLM):
    """A language model of a backbone and an LM head. An architecture adds its blocks."""

    backbone_type: type[Backbone] = Backbone
    backbone_names: tuple[tuple[str, str], ...] = ()
    """Attributes of the backbone with their names in a checkpoint, if they differ."""
    norm_plus_one = False
    """True if a checkpoint has the final norm's weight less 1."""

    def __init__(
        self,
        build: ModelBuilder,
        spec: ModelSpec,
        *,
        embedding_multiplier: float = 1.0,
        logits_multiplier: float = 1.0,
        logits_cap: float | None = None,
        final_norm: LayerNorm | PlainRMSNorm | HyperConnection | None = None,
        is_wide: bool = False,
    ) -> None:
        super().__init__(build, spec, logits_multiplier, logits_cap)
        self.images = None if spec.vision is None else self.make_encoder(spec.vision)
        self.names = {"images": ""}  # Most encoders have parts beside the language model.
        norm_eps, names = spec.hyperparameters.norm_eps, dict(self.backbone_names)
        how = (norm_eps, names, embedding_multiplier, self.norm_plus_one, final_norm, is_wide)
        self.model = self.backbone_type(build, spec, self.make_block, *how)
        self.mtp: PredictionHead | None = None
        self.keeper: HiddenStateKeeper | None = None
        if spec.drafter is not None and spec.drafter.method == "mtp":
            self.mtp = self.make_head(spec.drafter.layers)
        elif spec.drafter is not None and spec.drafter.starts_from_hidden:
            self.keeper = HiddenStateKeeper(build)

    @abstractmethod
    def make_block(self, layer: LayerSpec) -> Module:
        """Make a block for `layer`, called with x [tokens, hidden], angles, step and the layer's memory."""

    def make_head(self, layers: Sequence[LayerSpec]) -> PredictionHead:
        """Make the prediction head of these layers, in architectures that have one."""
        raise NotImplementedError

    def make_encoder(self, vision: VisionSpec) -> Module:
        """Make the encoder of images, in architectures that have one."""
        raise NotImplementedError

    @property
    def backbone(self) -> Backbone:
        return self.model

    @property
    def head(self) -> PredictionHead | None:
        return self.mtp

    @property
    def encoder(self) -> Module | None:
        return self.images

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        hidden = self.model(inputs, memory)
        behind = memory[len(self.model.layers) : len(memory) - (self.spec.vision is not None)]
        if self.mtp is not None:
            self.mtp.update_head_cache(hidden, self.model.embed(inputs, memory), inputs, behind)
        elif self.keeper is not None:
            self.keeper.previous_hidden(hidden, inputs, behind[-1])
        return hidden
