"""Falcon-H1 (model_type `falcon_h1`): attention and a Mamba-2 mixer side by side, then a gated MLP."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mamba import Mamba2Mixer
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Multiplier
from ostinato.models.base import Block, CausalLM, mamba2_mixer
from ostinato.models.falcon_h1.spec import FalconH1Hyperparameters
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec

NAMES = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}


class FalconH1(CausalLM):
    """The language model."""

    backbone_names = (("norm", "final_layernorm"),)

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        hyper: FalconH1Hyperparameters = spec.hyperparameters
        super().__init__(
            build, spec, embedding_multiplier=hyper.multipliers.embedding, logits_multiplier=hyper.multipliers.logits
        )

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: FalconH1Hyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        assert isinstance(layer.mixer, Mamba2Spec), "every layer has a mixer"
        mlp = GatedMLP(
            build,
            size,
            hyper.intermediate_size,
            hyper.mlp_bias,
            gate_multiplier=hyper.multipliers.mlp_gate,
            down_multiplier=hyper.multipliers.mlp_down,
        )
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=self._attention(layer.attention, hyper),
            mixer=self._mamba(layer.mixer, hyper),
            mlp=mlp,
            names=NAMES,
        )

    def _attention(self, spec: AttentionSpec, hyper: FalconH1Hyperparameters) -> Attention:
        return Attention(
            self.build,
            self.spec.hidden_size,
            spec,
            bias=hyper.attention_bias,
            in_multiplier=hyper.multipliers.attention_in,
            key_multiplier=hyper.multipliers.key,
            out_multiplier=hyper.multipliers.attention_out,
        )

    def _mamba(self, spec: Mamba2Spec, hyper: FalconH1Hyperparameters) -> Mamba2Mixer:
        return mamba2_mixer(
            self.build,
            self.spec.hidden_size,
            spec,
            hyper,
            has_norm=hyper.mamba_norm,
            norm_before_gate=hyper.mamba_norm_before_gate,
            out_bias=hyper.mamba_out_bias,
            in_multiplier=hyper.multipliers.ssm_in,
            in_scale=_by_output(spec, hyper.multipliers.ssm),
            out_multiplier=hyper.multipliers.ssm_out,
        )


def _by_output(spec: Mamba2Spec, multipliers: tuple[float, ...]) -> Multiplier:
    """Return the multiplier of each part, with the part's number of outputs of the mixer's input projection."""
    bc_size = spec.num_groups * spec.state_size
    sizes = (spec.intermediate_size, spec.intermediate_size, bc_size, bc_size, spec.num_heads)
    return tuple(zip(multipliers, sizes, strict=True))
