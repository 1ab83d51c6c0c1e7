"""Gemma 4 Unified (model_type `gemma4_unified`): Gemma 4, some of whose tokens are embedded pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.norm import LayerNorm
from ostinato.layers.vision import Encoder, linear
from ostinato.models.gemma4.model import Gemma4VL, Projector
from ostinato.models.gemma4_unified.spec import UnifiedHyperparameters
from ostinato.plan.layer_specs import VisionSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, EncoderInputs

NORM_EPS = 1e-5
"""Epsilon of the norms with a bias."""
EMBEDDER, PROJECTION = "embed_vision.", "embedding_projection."


class PixelEmbedder(Module):
    """Matmul with a token's pixels between two norms, plus the embeddings of its column and its row, normed again."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec) -> None:
        super().__init__()
        self.ops, size, count = build.ops, vision.hidden_size, vision.num_positions
        self.patch_ln1 = LayerNorm(build, vision.patch_elements, NORM_EPS)
        self.patch_dense = linear(build, vision.patch_elements, size)
        self.patch_ln2 = LayerNorm(build, size, NORM_EPS)
        stored = {"stored_shape": (count // 2, 2, size)}
        self.pos_embedding = self.declare(build, "pos_embedding", count, size, role="embedding", **stored)
        self.pos_norm = LayerNorm(build, size, NORM_EPS)

    def forward(self, inputs: EncoderInputs) -> Array:
        """Embed pixels, [tokens, elements] -> [tokens, hidden]."""
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(inputs.patches)))
        positions = self.ops.weighted_embedding(inputs.taps, inputs.tap_weights, self.pos_embedding)
        return self.pos_norm(self.ops.add(x, positions))


class Gemma4Unified(Gemma4VL):
    """Language model with the embedder of pixels, if it has one."""

    def make_encoder(self, vision: VisionSpec) -> Encoder:
        hyper: UnifiedHyperparameters = self.spec.encoder_hyperparameters
        projector = Projector(self.build, vision, hyper.projector_norm_eps, 1.0)
        names = {
            "vision_tower": EMBEDDER.removesuffix("."),
            "multi_modal_projector": f"{EMBEDDER}multimodal_embedder",
        }
        return Encoder(PixelEmbedder(self.build, vision), projector, names)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate names; the hub's checkpoints have `vision_embedder`, and the projection outside of it."""
        name = name.replace("model.vision_embedder.", f"model.{EMBEDDER}", 1)
        name = name.replace(f"model.{EMBEDDER}{PROJECTION}", f"model.{EMBEDDER}multimodal_embedder.{PROJECTION}", 1)
        return super().checkpoint_name(name)
