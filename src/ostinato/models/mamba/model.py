"""Mamba, Falcon-Mamba and Mamba-2 (model_types `mamba`, `falcon_mamba`, `mamba2`): one state mixer in every layer."""

from __future__ import annotations

from ostinato.layers.mamba import Mamba1Mixer, Mamba2Mixer
from ostinato.layers.module import ModelBuilder
from ostinato.models.base import CausalLM, MixerBlock
from ostinato.models.mamba.spec import Mamba2Hyperparameters, MambaHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba1Spec, Mamba2Spec
from ostinato.plan.model import ModelSpec


class StateSpaceDecoder(CausalLM):
    """A pure state-space model, whose checkpoints name the parts differently from those of transformers."""

    backbone_names = (("embed_tokens", "embeddings"), ("norm", "norm_f"))

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec, is_wide=spec.hyperparameters.residual_in_float32)
        self.names = {"model": "backbone"}

    def checkpoint_name(self, name: str) -> str | None:
        """Translate the embedding's name, which the original checkpoints have in the singular."""
        return super().checkpoint_name(name.replace("backbone.embedding.", "backbone.embeddings."))


class Mamba(StateSpaceDecoder):
    """The language model of Mamba and Falcon-Mamba."""

    def make_block(self, layer: LayerSpec) -> MixerBlock:
        assert isinstance(layer.mixer, Mamba1Spec), "every layer has a mixer"
        hyper: MambaHyperparameters = self.spec.hyperparameters
        has_norms = hyper.inner_norm_eps is not None
        mixer = Mamba1Mixer(
            self.build,
            self.spec.hidden_size,
            layer.mixer,
            inner_norms="plain" if has_norms else "none",
            eps=hyper.inner_norm_eps or 0.0,
            bias=hyper.bias,
            conv_bias=hyper.conv_bias,
        )
        return MixerBlock(self.build, self.spec.hidden_size, hyper.norm_eps, mixer)


class Mamba2(StateSpaceDecoder):
    """The language model of Mamba-2."""

    def make_block(self, layer: LayerSpec) -> MixerBlock:
        assert isinstance(layer.mixer, Mamba2Spec), "every layer has a mixer"
        hyper: Mamba2Hyperparameters = self.spec.hyperparameters
        mixer = Mamba2Mixer(
            self.build,
            self.spec.hidden_size,
            layer.mixer,
            eps=hyper.norm_eps,
            proj_bias=hyper.proj_bias,
            conv_bias=hyper.conv_bias,
            dt_limit=hyper.dt_limit,
        )
        return MixerBlock(self.build, self.spec.hidden_size, hyper.norm_eps, mixer)
