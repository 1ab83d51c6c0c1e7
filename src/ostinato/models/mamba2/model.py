"""Mamba-2 (model_type `mamba2`): a pure state-space model, one mixer in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.mamba2 import Mamba2Mixer
from ostinato.layers.module import Builder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.models.decoder import Decoder
from ostinato.models.mamba2.spec import Mamba2Hyperparameters
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import LayerSpec, ModelSpec

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step import LayerMemory, StepInputs


class Block(Module):
    """x + mixer(norm(x))."""

    def __init__(self, build: Builder, hidden_size: int, mamba2: Mamba2Spec, hyper: Mamba2Hyperparameters) -> None:
        super().__init__()
        self.dtype = build.dtype
        self.residual_dtype = build.float32 if hyper.residual_in_float32 else build.dtype
        self.norm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.mixer = Mamba2Mixer(
            build,
            hidden_size,
            mamba2,
            eps=hyper.norm_eps,
            proj_bias=hyper.proj_bias,
            conv_bias=hyper.conv_bias,
            dt_limit=hyper.dt_limit,
        )

    def forward(self, x: torch.Tensor, _: None, step: StepInputs, memory: LayerMemory) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden] in the dtype of the residual stream"""
        # Norms see the residual rounded to the model's dtype; only the sum is kept in float32.
        return self.mixer(self.norm(x.to(self.dtype)), step, memory, x.to(self.residual_dtype))


class Mamba2(Decoder):
    """The language model."""

    def __init__(self, build: Builder, spec: ModelSpec) -> None:
        names = {"embed_tokens": "embeddings", "norm": "norm_f"}
        super().__init__(build, spec, norm_eps=spec.hyperparameters.norm_eps, names=names)
        self.names = {"model": "backbone"}

    def make_block(self, layer: LayerSpec) -> Block:
        assert isinstance(layer.mixer, Mamba2Spec), "every layer has a mixer"
        return Block(self.build, self.spec.hidden_size, layer.mixer, self.spec.hyperparameters)

    def checkpoint_name(self, name: str) -> str | None:
        """The original checkpoints of the architecture have the embedding in the singular."""
        return super().checkpoint_name(name.replace("backbone.embedding.", "backbone.embeddings."))
