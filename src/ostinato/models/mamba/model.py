"""Mamba and Falcon-Mamba (model_types `mamba`, `falcon_mamba`): pure state-space models, one mixer in every layer."""

from __future__ import annotations

from ostinato.layers.mamba1 import Mamba1Mixer
from ostinato.models.decoder import MixerBlock, StateSpaceDecoder
from ostinato.models.mamba.spec import MambaHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba1Spec


class Mamba(StateSpaceDecoder):
    """The language model."""

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
