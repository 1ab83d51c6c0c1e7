"""Granite 4 (model_type `granitemoehybrid`): a mixer, then a shared MLP beside experts; four multipliers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ostinato.layers.attention import Attention
from ostinato.layers.build import Build, Target
from ostinato.layers.linear import Embedding, Linear
from ostinato.layers.mamba2 import Mamba2Mixer
from ostinato.layers.moe import Experts
from ostinato.layers.norm import RMSNorm
from ostinato.layers.rotary import Rotary
from ostinato.layers.step import LayerMemory, StepInputs
from ostinato.models.base import CausalLM
from ostinato.models.granitemoehybrid.spec import GraniteMoeHybridHyperparameters, MoeHyperparameters
from ostinato.plan.model import ModelSpec


class StackedExperts(Experts):
    """Experts that the checkpoint holds stacked too: one tensor inward, gates first, and one outward."""

    is_stack = True

    def checkpoint_names(self, path: str) -> tuple[str, ...]:
        parent = path.rpartition(".")[0]
        return (f"{parent}.input_linear", f"{parent}.output_linear")

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Target]]:
        for name, matrix in zip(self.checkpoint_names(prefix), (self.up, self.down), strict=True):
            yield f"{name}.weight", matrix.target()


class Router(nn.Module):
    """The choice of experts, whose weights are multiplied by `multiplier`."""

    def __init__(self, build: Build, hidden_size: int, moe: MoeHyperparameters, multiplier: float) -> None:
        super().__init__()
        self.op, self.top_k, self.multiplier = build.ops.route, moe.top_k, multiplier
        self.layer = Linear(build, hidden_size, moe.num_experts, keeps_dtype=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> numbers of experts and their weights, [tokens, 2, top_k]"""
        return self.op(x, self.layer.weight, None, self.top_k, scaling=self.multiplier)


class MoE(nn.Module):
    """The routed experts, times `multiplier`, plus the residual."""

    def __init__(self, build: Build, hidden_size: int, moe: MoeHyperparameters, multiplier: float) -> None:
        super().__init__()
        self.router = Router(build, hidden_size, moe, multiplier)
        self.experts = StackedExperts(build, moe.num_experts, hidden_size, moe.intermediate_size, "swiglu")

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        return self.experts(x, self.router(x), residual)


class SharedMLP(nn.Module):
    """The gated MLP that every token passes, times `multiplier`, plus the residual; gate and up projection are one
    tensor in the checkpoint."""

    def __init__(self, build: Build, hidden_size: int, intermediate_size: int, multiplier: float) -> None:
        super().__init__()
        self.input_linear = Linear(build, hidden_size, 2 * intermediate_size)
        self.output_linear = Linear(build, intermediate_size, hidden_size, multiplier=multiplier)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        return self.output_linear(self.input_linear(x, activation="swiglu"), residual)


class Block(nn.Module):
    """The mixer, then MLP and experts, each on a norm of the residual stream and added to it, scaled."""

    def __init__(self, build: Build, hidden_size: int, kind: str, hyper: GraniteMoeHybridHyperparameters) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        if kind == "mamba2":
            self.mamba = Mamba2Mixer(
                build,
                hidden_size,
                hyper.mamba2,
                eps=hyper.norm_eps,
                norm_group_size=hyper.mamba2.intermediate_size // hyper.mamba2.num_groups,
                proj_bias=hyper.mamba_proj_bias,
                conv_bias=hyper.conv_bias,
                dt_limit=hyper.dt_limit,
                out_multiplier=hyper.residual_multiplier,
            )
        else:
            self.self_attn = Attention(
                build,
                hidden_size,
                hyper.attention,
                bias=hyper.attention_bias,
                out_bias=hyper.attention_bias,
                scale=hyper.attention_multiplier,
                out_multiplier=hyper.residual_multiplier,
            )
        self.post_attention_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.shared_mlp = SharedMLP(build, hidden_size, hyper.shared_intermediate_size, hyper.residual_multiplier)
        self.block_sparse_moe = (
            MoE(build, hidden_size, hyper.moe, hyper.residual_multiplier) if hyper.moe is not None else None
        )

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor | None,
        step: StepInputs,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        y = self.input_layernorm(x)
        if self.kind == "mamba2":
            x = self.mamba(y, step, memory, x)
        else:
            x = self.self_attn(y, angles, step, memory, x)
        y = self.post_attention_layernorm(x)
        x = self.shared_mlp(y, x)
        return x if self.block_sparse_moe is None else self.block_sparse_moe(y, x)


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__()
        hyper: GraniteMoeHybridHyperparameters = spec.hyperparameters
        self.embed_tokens = Embedding(build, spec.vocab_size, spec.hidden_size, hyper.embedding_multiplier)
        self.layers = nn.ModuleList(Block(build, spec.hidden_size, kind, hyper) for kind in hyper.kinds)
        self.norm = RMSNorm(build, spec.hidden_size, hyper.norm_eps)
        self.rotary = Rotary(build, spec.rope) if spec.rope is not None else None

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """-> [tokens, hidden]"""
        x = self.embed_tokens(step.token_ids)
        angles = self.rotary(step.positions) if self.rotary is not None else None
        for block, layer_memory in zip(self.layers, memory, strict=True):
            x = block(x, angles, step, layer_memory)
        return self.norm(x)


class GraniteMoeHybrid(CausalLM):
    """The language model."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__(build, spec, 1.0 / spec.hyperparameters.logits_scaling)
        self.model = Backbone(build, spec)

    @property
    def embedding(self) -> Embedding:
        return self.model.embed_tokens

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        return self.model(step, memory)
