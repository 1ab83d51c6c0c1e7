"""Mamba-2 (model_type `mamba2`): a pure state-space model, one mixer in every layer."""

from __future__ import annotations

from ostinato.layers.mamba2 import Mamba2Mixer
from ostinato.models.decoder import MixerBlock, StateSpaceDecoder
from ostinato.models.mamba2.spec import Mamba2Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec


class Mamba2(StateSpaceDecoder):
    """The language model."""

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
