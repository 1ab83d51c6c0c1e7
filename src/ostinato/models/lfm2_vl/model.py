"""LFM2-VL (model_type `lfm2_vl`): LFM2, some of whose tokens are the outputs of SigLIP 2."""

from __future__ import annotations

from typing import Any

from ostinato.layers.module import ModelBuilder
from ostinato.layers.vision import Encoder, PatchMerger, Siglip
from ostinato.models.lfm2.model import Lfm2
from ostinato.models.lfm2_vl.spec import Lfm2VLHyperparameters
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

PROJECTOR_NAMES = {"norm": "layer_norm", "linear_fc1": "linear_1", "linear_fc2": "linear_2"}


class Lfm2VL(Lfm2):
    """Language model with its encoder."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.names = {"model": "model.language_model", "images": "model"}

    def make_encoder(self, vision: VisionSpec) -> Encoder:
        hyper: Lfm2VLHyperparameters = self.spec.encoder_hyperparameters
        tower = Siglip(self.build, vision, hyper.activation, hyper.norm_eps)
        how: dict[str, Any] = {"inner_size": hyper.projector_size, "bias": hyper.projector_bias}
        projector = PatchMerger(self.build, vision, True, norm_eps=1e-5 if hyper.projector_has_norm else None, **how)
        projector.names = PROJECTOR_NAMES
        return Encoder(tower, projector)

    def checkpoint_name(self, name: str) -> str | None:
        """Take the tower's tensors with and without `vision_model`, and leave out those of its pooling head."""
        name = name.replace("model.vision_tower.vision_model.", "model.vision_tower.", 1)
        return None if name.startswith("model.vision_tower.head.") else super().checkpoint_name(name)
