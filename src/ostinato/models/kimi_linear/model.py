"""Kimi Linear (model_type `kimi_linear`): KDA or latent attention, then a gated MLP or experts with shared ones."""

from __future__ import annotations

import re

from ostinato.layers.delta_net import KimiDeltaAttention
from ostinato.layers.latent_attention import LatentAttention
from ostinato.layers.mlp import Experts, GatedMLP, SigmoidRouter
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.base import Block, CausalLM
from ostinato.models.kimi_linear.spec import KimiLinearHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec

SPARSE = "block_sparse_moe"
"""Checkpoints' name of experts with their router and shared experts; transformers uses it for an MLP too."""

OF_DENSE = re.compile(rf"(\.layers\.\d+\.){SPARSE}\.(?=(gate|up|down)_proj\.)")


class SparseMLP(Module):
    """Experts of a sigmoid router, and a gated MLP that is all shared experts, plus the residual."""

    def __init__(
        self,
        build: ModelBuilder,
        spec: ExpertsSpec,
        hyper: KimiLinearHyperparameters,
        names: tuple[str, str, str] = ("w1", "w3", "w2"),
        bias_name: str = "e_score_correction_bias",
        clamp: tuple[float, float, float] | None = None,
    ) -> None:
        """Build the layer. A checkpoint has the `names` for gate, up and down, and `bias_name` for the router's.

        `clamp` is that of `ops.moe`.
        """
        super().__init__()
        self.gate = SigmoidRouter(build, spec.size, hyper.moe, bias_name)
        self.experts = Experts(build, spec, "swiglu", names=names, clamp=clamp)
        self.shared_experts: GatedMLP | None = None
        if hyper.shared_size:
            self.shared_experts = GatedMLP(build, spec.size, hyper.shared_size, clamp=clamp)

    def forward(self, x: Array, residual: Array | None) -> Array:
        """Apply the experts to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        shared = residual if self.shared_experts is None else self.shared_experts(x, residual)
        return self.experts(x, self.gate(x), shared)


class KimiLinear(CausalLM):
    """The language model."""

    def make_block(self, layer: LayerSpec) -> Block:
        hyper: KimiLinearHyperparameters = self.spec.hyperparameters
        build, size, eps = self.build, self.spec.hidden_size, hyper.norm_eps
        names, mixer, attention = {}, None, None
        mlp: Module
        if isinstance(layer.mixer, GatedDeltaSpec):
            mixer = KimiDeltaAttention(build, size, layer.mixer, eps=eps)
            names["mixer"] = "self_attn"
        elif layer.attention is not None:
            attention = LatentAttention(build, size, layer.attention, hyper.latent)
        if layer.experts is not None:
            mlp = SparseMLP(build, layer.experts, hyper)
            names["mlp"] = SPARSE
        else:
            mlp = GatedMLP(build, size, hyper.intermediate_size)
        return Block(build, size, eps, mlp=mlp, attention=attention, mixer=mixer, names=names)

    def checkpoint_name(self, name: str) -> str | None:
        return super().checkpoint_name(OF_DENSE.sub(r"\1mlp.", name))
