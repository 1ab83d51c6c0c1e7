"""Mamba-2 (model_type `mamba2`): a pure state-space model, one mixer in every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ostinato.layers.build import Build
from ostinato.layers.linear import Embedding
from ostinato.layers.mamba2 import Mamba2Mixer
from ostinato.layers.norm import RMSNorm
from ostinato.layers.step import LayerMemory, StepInputs
from ostinato.models.base import CausalLM
from ostinato.models.mamba2.spec import Mamba2Hyperparameters
from ostinato.plan.model import ModelSpec


class Block(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, build: Build, hidden_size: int, hyper: Mamba2Hyperparameters) -> None:
        super().__init__()
        self.dtype = build.dtype
        self.residual_dtype = torch.float32 if hyper.residual_in_float32 else build.dtype
        self.norm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.mixer = Mamba2Mixer(
            build,
            hidden_size,
            hyper.mamba2,
            eps=hyper.norm_eps,
            norm_group_size=hyper.mamba2.intermediate_size // hyper.mamba2.num_groups,
            proj_bias=hyper.proj_bias,
            conv_bias=hyper.conv_bias,
            dt_limit=hyper.dt_limit,
        )

    def forward(self, x: torch.Tensor, step: StepInputs, memory: LayerMemory) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden] in the dtype of the residual stream"""
        # Norms see the residual rounded to the model's dtype; only the sum is kept in float32.
        return self.mixer(self.norm(x.to(self.dtype)), step, memory, x.to(self.residual_dtype))


class Backbone(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__()
        hyper: Mamba2Hyperparameters = spec.hyperparameters
        self.embeddings = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(build, spec.hidden_size, hyper) for _ in spec.layers)
        self.norm_f = RMSNorm(build, spec.hidden_size, hyper.norm_eps)

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """-> [tokens, hidden]"""
        x = self.embeddings(step.token_ids)
        for block, layer_memory in zip(self.layers, memory, strict=True):
            x = block(x, step, layer_memory)
        return self.norm_f(x.to(self.embeddings.dtype))


class Mamba2(CausalLM):
    """The language model."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.backbone = Backbone(build, spec)

    @property
    def embedding(self) -> Embedding:
        return self.backbone.embeddings

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        return self.backbone(step, memory)

    def checkpoint_name(self, name: str) -> str | None:
        """The original checkpoints of the architecture have the embedding in the singular."""
        return super().checkpoint_name(name.replace("backbone.embedding.", "backbone.embeddings."))
