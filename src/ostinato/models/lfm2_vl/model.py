"""LFM2-VL (model_type `lfm2_vl`): LFM2, some of whose tokens are the outputs of SigLIP 2."""

from __future__ import annotations

from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import LayerNorm
from ostinato.layers.vision import Encoder, Siglip, linear
from ostinato.models.lfm2.model import Lfm2
from ostinato.models.lfm2_vl.spec import Lfm2VLHyperparameters
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

PROJECTOR_EPS = 1e-5


class Projector(Module):
    """Merger of neighbouring patches, side by side, and normed if it has a norm, into one token of the text part."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: Lfm2VLHyperparameters) -> None:
        super().__init__()
        self.size = vision.patches_per_token * vision.hidden_size
        self.layer_norm = LayerNorm(build, self.size, PROJECTOR_EPS) if hyper.projector_has_norm else None
        self.linear_1 = linear(build, self.size, hyper.projector_size, bias=hyper.projector_bias)
        self.linear_2 = linear(build, hyper.projector_size, vision.out_hidden_size, bias=hyper.projector_bias)

    def forward(self, x: Array) -> Array:
        """Merge patches, [patches, hidden] -> [tokens, out]."""
        merged = x.reshape(-1, self.size)
        if self.layer_norm is not None:
            merged = self.layer_norm(merged)
        return self.linear_2(self.linear_1(merged, activation="gelu"))


class Lfm2VL(Lfm2):
    """Language model with its encoder."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.names = {"model": "model.language_model", "images": "model"}

    def make_encoder(self, vision: VisionSpec) -> Encoder:
        hyper: Lfm2VLHyperparameters = self.spec.encoder_hyperparameters
        tower = Siglip(self.build, vision, hyper.activation, hyper.norm_eps)
        return Encoder(tower, Projector(self.build, vision, hyper))

    def checkpoint_name(self, name: str) -> str | None:
        """Take the tower's tensors with and without `vision_model`, and leave out those of its pooling head."""
        name = name.replace("model.vision_tower.vision_model.", "model.vision_tower.", 1)
        return None if name.startswith("model.vision_tower.head.") else super().checkpoint_name(name)
