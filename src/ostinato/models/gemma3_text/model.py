"""Gemma 3, its text model (model_type `gemma3_text`), also inside `gemma3`.

Attention and MLP each have a norm before and after them, and layers are local or global.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.layers.attention import Attention, Rotary
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.gemma3_text.spec import LOCAL, Gemma3Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step_inputs import LayerCache, StepInputs


class Block(Module):
    """Attention and a gated MLP, each between two norms. All norms are stored less 1."""

    def __init__(self, build: ModelBuilder, size: int, layer: LayerSpec, hyper: Gemma3Hyperparameters) -> None:
        super().__init__()
        assert layer.attention is not None, "every layer has attention"
        eps = hyper.norm_eps
        self.is_local = layer.kind == LOCAL
        self.input_layernorm = RMSNorm(build, size, eps, plus_one=True)
        self.self_attn = Attention(
            build,
            size,
            layer.attention,
            bias=hyper.attention_bias,
            qk_norm_eps=eps,
            qk_norm_plus_one=True,
            scale=hyper.scale,
        )
        self.post_attention_layernorm = RMSNorm(build, size, eps, plus_one=True)
        self.pre_feedforward_layernorm = RMSNorm(build, size, eps, plus_one=True)
        self.mlp = GatedMLP(build, size, hyper.intermediate_size, activation="geglu")
        self.post_feedforward_layernorm = RMSNorm(build, size, eps, plus_one=True)

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor | None, step: StepInputs, memory: LayerCache
    ) -> torch.Tensor:
        """Apply the layer, [tokens, hidden] -> [tokens, hidden]."""
        y = self.self_attn(self.input_layernorm(x), angles, step, memory, None)
        x = self.post_attention_layernorm(y, x)
        y = self.mlp(self.pre_feedforward_layernorm(x), None)
        return self.post_feedforward_layernorm(y, x)


class Gemma3Backbone(Backbone):
    """Embedding, blocks and final norm. Local layers have a separate rotary embedding."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: Gemma3Hyperparameters = spec.hyperparameters
        super().__init__(
            build,
            spec,
            lambda layer: Block(build, spec.hidden_size, layer, hyper),
            hyper.norm_eps,
            embedding_multiplier=build.rounded(spec.hidden_size**0.5),
            norm_plus_one=True,
        )
        self.local_rotary = Rotary(build, hyper.local_rope)

    def forward(self, step: StepInputs, memory: Sequence[LayerCache]) -> torch.Tensor:
        """Compute the final normed hidden states of a step, [tokens, hidden]."""
        assert self.rotary is not None, "all layers have positions"
        x = self.embed_tokens(step.token_ids)
        angles, local_angles = self.rotary(step.positions), self.local_rotary(step.positions)
        for block, layer_memory in zip(self.layers, memory, strict=True):
            assert isinstance(block, Block), "its blocks are those of this file"
            x = block(x, local_angles if block.is_local else angles, step, layer_memory)
        return self.norm(x)


_BESIDE_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Prefixes of the tensors of a `gemma3` checkpoint that are not its text model's."""


class Gemma3(CausalLM):
    """The language model, also that of a `gemma3` checkpoint."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.model = Gemma3Backbone(build, spec)

    @property
    def backbone(self) -> Backbone:
        return self.model

    def forward(self, step: StepInputs, memory: Sequence[LayerCache]) -> torch.Tensor:
        return self.model(step, memory)

    def checkpoint_name(self, name: str) -> str | None:
        if self.spec.architecture == "gemma3":
            if name.startswith(_BESIDE_TEXT):
                return None
            # transformers 5 writes the second spelling; the hub's checkpoints have the first.
            name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
        return super().checkpoint_name(name)
