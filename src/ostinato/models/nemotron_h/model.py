"""Nemotron-H (model_type `nemotron_h`): blocks of one norm and one mixer each, in the pattern of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ostinato.layers.attention import Attention
from ostinato.layers.build import Build
from ostinato.layers.linear import Embedding, Linear
from ostinato.layers.mamba2 import Mamba2Mixer
from ostinato.layers.mlp import MLP
from ostinato.layers.moe import Experts
from ostinato.layers.norm import RMSNorm
from ostinato.layers.step import LayerMemory, StepInputs
from ostinato.models.base import CausalLM, PredictionHead
from ostinato.models.nemotron_h.spec import MoeHyperparameters, NemotronHHyperparameters
from ostinato.plan.model import ModelSpec


class Router(nn.Module):
    """Scores experts in float32; its correction bias influences the choice, not the weights."""

    def __init__(self, build: Build, hidden_size: int, moe: MoeHyperparameters) -> None:
        super().__init__()
        self.op, self.moe = build.ops.route, moe
        self.weight = build.weight(moe.num_experts, hidden_size)
        self.e_score_correction_bias = build.weight(moe.num_experts, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> numbers of experts and their weights, [tokens, 2, top_k]"""
        moe = self.moe
        groups = (moe.num_groups, moe.top_groups)
        return self.op(x, self.weight, self.e_score_correction_bias, moe.top_k, *groups, moe.normalize, moe.scaling)


class MoE(nn.Module):
    """Routed experts, in a latent space where the checkpoint has one, beside one shared expert, plus the residual."""

    def __init__(self, build: Build, hidden_size: int, hyper: NemotronHHyperparameters) -> None:
        super().__init__()
        moe = hyper.moe
        assert moe is not None
        self.gate = Router(build, hidden_size, moe)
        inner = moe.latent_size or hidden_size
        self.experts = Experts(build, moe.num_experts, inner, moe.intermediate_size, hyper.mlp_activation)
        shared = (moe.shared_intermediate_size, hyper.mlp_activation, hyper.mlp_bias)
        self.shared_experts = MLP(build, hidden_size, *shared)
        self.latent = moe.latent_size is not None
        if self.latent:
            self.fc1_latent_proj = Linear(build, hidden_size, inner, hyper.mlp_bias)
            self.fc2_latent_proj = Linear(build, inner, hidden_size, hyper.mlp_bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] -> [tokens, hidden]"""
        choices = self.gate(x)
        shared = self.shared_experts(x, residual)
        if self.latent:
            return self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), choices), shared)
        return self.experts(x, choices, shared)


class Block(nn.Module):
    """x + mixer(norm(x)). Attention leaves out keys before position `first_key`."""

    def __init__(
        self, build: Build, hidden_size: int, kind: str, hyper: NemotronHHyperparameters, first_key: int = 0
    ) -> None:
        super().__init__()
        self.kind = kind
        self.norm = RMSNorm(build, hidden_size, hyper.norm_eps)
        if kind == "mamba2":
            self.mixer: nn.Module = Mamba2Mixer(
                build,
                hidden_size,
                hyper.mamba2,
                eps=hyper.norm_eps,
                norm_group_size=hyper.mamba2.intermediate_size // hyper.mamba2.num_groups,
                proj_bias=hyper.mamba_proj_bias,
                conv_bias=hyper.conv_bias,
                dt_limit=hyper.dt_limit,
            )
        elif kind == "attention":
            self.mixer = Attention(build, hidden_size, hyper.attention, first_key=first_key)
        elif kind == "mlp":
            self.mixer = MLP(build, hidden_size, hyper.intermediate_size, hyper.mlp_activation, hyper.mlp_bias)
        else:
            self.mixer = MoE(build, hidden_size, hyper)

    def forward(self, x: torch.Tensor, step: StepInputs, memory: LayerMemory) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        y = self.norm(x)
        if self.kind == "mamba2":
            return self.mixer(y, step, memory, x)
        if self.kind == "attention":
            return self.mixer(y, None, step, memory, x)
        return self.mixer(y, x)


class Backbone(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__()
        hyper: NemotronHHyperparameters = spec.hyperparameters
        self.embeddings = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(build, spec.hidden_size, kind, hyper) for kind in hyper.kinds)
        self.norm_f = RMSNorm(build, spec.hidden_size, hyper.norm_eps)

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """-> [tokens, hidden]"""
        x = self.embeddings(step.token_ids)
        for block, layer_memory in zip(self.layers, memory, strict=True):
            x = block(x, step, layer_memory)
        return self.norm_f(x)


class HeadBlock(Block):
    """A block of the prediction head: the first one also joins its two inputs, the last one also norms its result."""

    def __init__(
        self, build: Build, hidden_size: int, kind: str, hyper: NemotronHHyperparameters, is_first: bool, is_last: bool
    ) -> None:
        super().__init__(build, hidden_size, kind, hyper, first_key=1)
        eps = hyper.norm_eps
        self.concat = build.ops.concat
        self.enorm = RMSNorm(build, hidden_size, eps) if is_first else None
        self.hnorm = RMSNorm(build, hidden_size, eps) if is_first else None
        self.eh_proj = Linear(build, 2 * hidden_size, hidden_size) if is_first else None
        self.final_layernorm = RMSNorm(build, hidden_size, eps) if is_last else None

    def join(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] twice -> [tokens, hidden]"""
        assert self.enorm is not None, "the first block joins"
        assert self.hnorm is not None, "the first block joins"
        assert self.eh_proj is not None, "the first block joins"
        return self.eh_proj(self.concat(self.enorm(embedded), self.hnorm(hidden)))

    def norm_result(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        assert self.final_layernorm is not None, "the last block norms"
        return self.final_layernorm(x)


class Head(PredictionHead):
    """The multi-token prediction head; its blocks have attention without positions, an MLP or experts."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__()
        hyper: NemotronHHyperparameters = spec.hyperparameters
        self.tap, self.token_shift = build.ops.tap, build.ops.token_shift
        kinds = hyper.mtp_kinds
        last = len(kinds) - 1
        self._blocks = [
            HeadBlock(build, spec.hidden_size, kind, hyper, i == 0, i == last) for i, kind in enumerate(kinds)
        ]
        self.layers = nn.ModuleList(self._blocks)
        self.last_attention = max((i for i, kind in enumerate(kinds) if kind == "attention"), default=-1)

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, step: StepInputs, memory: Sequence[LayerMemory]
    ) -> torch.Tensor:
        x = self._blocks[0].join(hidden, embedded)
        for block, layer_memory in zip(self._blocks, memory, strict=False):
            x = block(x, step, layer_memory)
        return self._blocks[-1].norm_result(x)

    def follow(
        self, hidden: torch.Tensor, embedded: torch.Tensor, step: StepInputs, memory: Sequence[LayerMemory]
    ) -> None:
        previous = self.tap.split("state", self._shift, (hidden,), step, memory[-1])
        if self.last_attention < 0:
            return
        x = self._blocks[0].join(previous, embedded)
        for block, layer_memory in zip(self._blocks[: self.last_attention], memory, strict=False):
            x = block(x, step, layer_memory)
        block = self._blocks[self.last_attention]
        assert isinstance(block.mixer, Attention), "it was found by its kind"
        block.mixer.store(block.norm(x), step, memory[self.last_attention])

    def _shift(self, hidden: torch.Tensor, step: StepInputs, memory: LayerMemory) -> torch.Tensor:
        """The hidden state before each token. -> [tokens, hidden]"""
        return self.token_shift(
            hidden,
            memory.conv_states,
            step.row_starts,
            step.read_slots,
            step.write_slots,
            step.num_decode_rows,
            step.checkpoints,
        )


class NemotronH(CausalLM):
    """The language model, with its prediction head if that makes drafts."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.model = Backbone(build, spec)
        drafts = spec.drafter is not None and spec.drafter.method == "mtp"
        self.mtp = Head(build, spec) if drafts else None

    @property
    def embedding(self) -> Embedding:
        return self.model.embeddings

    @property
    def head(self) -> Head | None:
        return self.mtp

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        own = len(self.model.layers)
        hidden = self.model(step, memory[:own])
        if self.mtp is not None:
            self.mtp.follow(hidden, self.embedding(step.token_ids), step, memory[own:])
        return hidden

    def checkpoint_name(self, name: str) -> str | None:
        """The backbone has two names; tensors of a prediction head that is not used are known, and not loaded."""
        if name.startswith("mtp."):
            return None if self.mtp is None else name
        if name.startswith("backbone."):
            name = "model." + name.removeprefix("backbone.")
        return super().checkpoint_name(name)
