"""Gemma 3 with images (model_type `gemma3`): the text model, some of whose tokens are the outputs of SigLIP."""

from __future__ import annotations

from typing import Any

from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import RMSNorm
from ostinato.layers.vision import Encoder, MeanOfPatches, Siglip
from ostinato.models.config_json import SiglipHyperparameters
from ostinato.models.gemma3_text.model import Gemma3
from ostinato.ops.step_inputs import Array
from ostinato.plan.layer_specs import VisionSpec


class Projector(Module):
    """Mean of the patches of a token, normed, times a matrix."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, norm_eps: float) -> None:
        super().__init__()
        self.linear, size = build.ops.linear, vision.hidden_size
        self.mean = MeanOfPatches(build, vision)
        self.mm_soft_emb_norm = RMSNorm(build, size, norm_eps, True)
        stored = {"names": ("mm_input_projection_weight",), "stored_shape": (size, vision.out_hidden_size)}
        how: dict[str, Any] = {"role": "linear", "stored_transposed": True, **stored}
        self.weight = self.declare(build, "weight", vision.out_hidden_size, size, **how)

    def forward(self, x: Array) -> Array:
        """Merge patches, [patches, hidden] -> [tokens, out]."""
        return self.linear(self.mm_soft_emb_norm(self.mean(x)), self.weight)


class Gemma3VL(Gemma3):
    """Language model with its encoder."""

    def make_encoder(self, vision: VisionSpec) -> Encoder:
        hyper: SiglipHyperparameters = self.spec.encoder_hyperparameters
        tower = Siglip(self.build, vision, hyper.activation, hyper.norm_eps)
        return Encoder(tower, Projector(self.build, vision, hyper.norm_eps))

    def checkpoint_name(self, name: str) -> str | None:
        """Translate names; transformers 5 writes `model.` before each part, the hub's checkpoints do not."""
        for part in ("vision_tower.", "multi_modal_projector."):
            if name.removeprefix("model.").startswith(part):
                name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
                return None if name.startswith("vision_tower.head.") else name
        # transformers 5 writes the second spelling; the hub's checkpoints have the first.
        name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
        return super().checkpoint_name(name)
