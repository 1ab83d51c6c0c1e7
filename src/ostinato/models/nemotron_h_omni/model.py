"""Nemotron 3 Nano Omni (model_type `nemotron_h_omni`): the text model, some of whose tokens are outputs of RADIO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.layers.module import ModelBuilder, Module, ModuleList
from ostinato.layers.norm import LayerNorm, RMSNorm
from ostinato.layers.vision import Encoder, EncoderAttention, EncoderMLP, GatedEncoderMLP, linear
from ostinato.models.nemotron_h.model import NemotronH
from ostinato.models.nemotron_h_omni.spec import NemotronHOmniHyperparameters
from ostinato.plan.layer_specs import VisionSpec

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array, EncoderInputs

NORM_EPS = 1e-5
"""Epsilon of the projector's norm."""


class PatchGenerator(Module):
    """Matmul with a patch, plus its resized position; class tokens and registers follow the positions in one table."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec) -> None:
        super().__init__()
        self.op, size = build.ops.weighted_embedding, vision.hidden_size
        self.embedder = linear(build, vision.patch_elements, size, bias=False)
        count, prefix = vision.num_positions, vision.num_prefix
        stored: dict[str, Any] = {"sizes": (count, prefix), "stored_shapes": ((1, count, size), (prefix, size))}
        names = ("pos_embed", "cls_token.token")
        self.table = self.declare(build, "table", count + prefix, size, role="embedding", names=names, **stored)

    def forward(self, inputs: EncoderInputs) -> Array:
        """Embed patches and prefixes, [rows, hidden]."""
        return self.embedder(inputs.patches, self.op(inputs.taps, inputs.tap_weights, self.table))


class LayerScale(Module):
    """Scale of a part's outputs (arXiv 2103.17239)."""

    def __init__(self, build: ModelBuilder, size: int) -> None:
        super().__init__()
        self.lambda1 = self.declare(build, "lambda1", size, role="bias", in_float32=True)


class VisionBlock(Module):
    """Attention, then the MLP, each on a norm of the residual stream, scaled and added to it."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: NemotronHOmniHyperparameters) -> None:
        super().__init__()
        size, inner_size, eps = vision.hidden_size, vision.intermediate_size, hyper.norm_eps
        self.norm1 = LayerNorm(build, size, eps)
        self.attn = EncoderAttention(build, size, vision.num_heads, has_bias=hyper.has_bias)
        self.layer_scale1 = LayerScale(build, size)
        self.norm2 = LayerNorm(build, size, eps)
        if hyper.is_gated:
            self.mlp: GatedEncoderMLP | EncoderMLP = GatedEncoderMLP(build, size, inner_size)
        else:
            self.mlp = EncoderMLP(build, size, inner_size, hyper.activation)
            self.mlp.names = {"linear_fc1": "fc1", "linear_fc2": "fc2"}
        self.layer_scale2 = LayerScale(build, size)

    def forward(self, x: Array, starts: Array) -> Array:
        """Apply the block, [rows, hidden] -> [rows, hidden]."""
        x = self.attn(self.norm1(x), None, starts, x, self.layer_scale1.lambda1)
        return self.mlp(self.norm2(x), x, self.layer_scale2.lambda1)


class Radio(Module):
    """Patch embedding and blocks. What they make of an image's prefix is thrown away behind the projector."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: NemotronHOmniHyperparameters) -> None:
        super().__init__()
        self.patch_generator = PatchGenerator(build, vision)
        self.blocks = ModuleList(VisionBlock(build, vision, hyper) for _ in range(vision.num_layers))

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images, [rows, hidden]."""
        x = self.patch_generator(inputs)
        for block in self.blocks:
            x = block(x, inputs.starts)
        return x


class Projector(Module):
    """Merger of neighbouring patches, side by side and normed, into one token of the text part."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: NemotronHOmniHyperparameters) -> None:
        super().__init__()
        self.size = vision.patches_per_token * vision.hidden_size
        self.names = {"norm": "0", "linear_1": "1", "linear_2": "3"}
        self.norm = RMSNorm(build, self.size, NORM_EPS)
        self.linear_1 = linear(build, self.size, hyper.projector_size, bias=False)
        self.linear_2 = linear(build, hyper.projector_size, vision.out_hidden_size, bias=False)

    def forward(self, x: Array) -> Array:
        """Merge patches, [rows, hidden] -> [tokens, out]."""
        return self.linear_2(self.linear_1(self.norm(x.reshape(-1, self.size)), activation="relu2"))


class OmniEncoder(Encoder):
    """Encoder of images; RADIO's outputs are normed if the text model has a prediction head."""

    def __init__(self, build: ModelBuilder, vision: VisionSpec, hyper: NemotronHOmniHyperparameters) -> None:
        names = {"vision_tower": "vision_model.radio_model.model", "multi_modal_projector": "mlp1"}
        super().__init__(Radio(build, vision, hyper), Projector(build, vision, hyper), names)
        has_norm = hyper.has_final_norm
        self.vision_final_layernorm = LayerNorm(build, vision.hidden_size, hyper.norm_eps) if has_norm else None

    def forward(self, inputs: EncoderInputs) -> Array:
        """Encode images -> [tokens, 1, hidden of the text part], those of prefixes among them."""
        x = self.vision_tower(inputs)
        if self.vision_final_layernorm is not None:
            x = self.vision_final_layernorm(x)
        tokens = self.multi_modal_projector(x)
        return tokens.reshape(tokens.shape[0], 1, -1)


BESIDE = ("sound_encoder.", "sound_projection.", "audio_tower.", "embed_audio.")
"""Prefixes of the tensors of an encoder of sounds."""
UNUSED = ("summary_idxs", "input_conditioner.", "model.patch_generator.video_embedder.")
"""Tensors of RADIO for other outputs, for pixels that are not normalised yet, and for videos."""


class NemotronHOmni(NemotronH):
    """The language model with its encoder, and its prediction head if that makes drafts."""

    def make_encoder(self, vision: VisionSpec) -> OmniEncoder:
        hyper: NemotronHOmniHyperparameters = self.spec.encoder_hyperparameters
        # Released checkpoints leave these out; transformers writes them.
        self.if_absent = {
            ".lambda1": hyper.layer_scale,
            "vision_final_layernorm.weight": 1.0,
            "vision_final_layernorm.bias": 0.0,
        }
        return OmniEncoder(self.build, vision, hyper)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate names; those of encoders that are not run give None."""
        if name.startswith(BESIDE):
            return None
        if name.startswith(("vision_model.", "vision_final_layernorm.", "mlp1.")):
            is_unused = name.removeprefix("vision_model.radio_model.").startswith(UNUSED)
            return None if self.images is None or is_unused else name
        return super().checkpoint_name(name.removeprefix("language_model."))
