"""LFM2-VL (model_type `lfm2_vl`): LFM2, some of whose tokens are the outputs of SigLIP 2."""

from __future__ import annotations

from ostinato.layers.module import ModelBuilder, Module, ModuleList
from ostinato.layers.norm import LayerNorm
from ostinato.layers.vision import Encoder, EncoderBlock, PositionEmbedding, linear
from ostinato.models.lfm2.model import Lfm2
from ostinato.models.lfm2_vl.spec import Lfm2VLHyperparameters
from ostinato.ops.step_inputs import Array, EncoderInputs
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

PROJECTOR_EPS = 1e-5


class PatchEmbeddings(Module):
    """Matmul with a patch, plus the learned positions, resized to the image's grid."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec) -> None:
        super().__init__()
        # SigLIP 1 has a convolution.
        kernel = (vision.hidden_size, vision.in_channels, vision.patch_size, vision.patch_size)
        stored = () if vision.is_naflex else kernel
        self.patch_embedding = linear(build, vision.patch_elements, vision.hidden_size, stored)
        self.position_embedding = PositionEmbedding(build, vision.num_positions, vision.hidden_size)

    def forward(self, patches: Array, inputs: EncoderInputs) -> Array:
        """Embed `patches` [patches, elements] -> [patches, hidden]."""
        return self.patch_embedding(patches, self.position_embedding(inputs.taps, inputs.tap_weights))


class Blocks(Module):
    """Layers of the encoder, under the checkpoint's name."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, activation: str, norm_eps: float) -> None:
        super().__init__()
        how = (activation, norm_eps, True)
        self.layers = ModuleList(EncoderBlock(build, vision, *how) for _ in range(vision.num_layers))


class VisionTower(Module):
    """SigLIP, 1 or 2, without its pooling head."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, activation: str, norm_eps: float) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(build, vision)
        self.encoder = Blocks(build, vision, activation, norm_eps)
        self.post_layernorm = LayerNorm(build, vision.hidden_size, norm_eps)

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images, [patches, hidden]."""
        x = self.embeddings(inputs.patches, inputs)
        for block in self.encoder.layers:
            x = block(x, None, inputs.starts)
        return self.post_layernorm(x)


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
        tower = VisionTower(self.build, vision, hyper.activation, hyper.norm_eps)
        return Encoder(tower, Projector(self.build, vision, hyper))

    def checkpoint_name(self, name: str) -> str | None:
        """Take the tower's tensors with and without `vision_model`, and leave out those of its pooling head."""
        name = name.replace("model.vision_tower.vision_model.", "model.vision_tower.", 1)
        return None if name.startswith("model.vision_tower.head.") else super().checkpoint_name(name)
