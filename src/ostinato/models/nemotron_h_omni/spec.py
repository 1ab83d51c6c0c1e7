"""Nemotron 3 Nano Omni: the text model, and RADIO as its encoder of images (arXiv 2412.07679).

The encoder of sounds that a checkpoint may have is not run, and videos are not taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import MAX_SIZE, activation, flag, integer, number, part, spec_of_text
from ostinato.models.nemotron_h.spec import model_spec as text_spec
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

SOUNDS = "the encoder of sounds is not run; requests have none"
NO_IMAGES = "config.json names no token of images (image_token_id), so that their encoder is not run"
WIDTH = 1280
"""Default size of the encoder's vectors."""
LEGACY = {
    "llm_config": "text_config",
    "img_context_token_id": "image_token_id",
    "sound_config": "audio_config",
    "vit_hidden_size": "vision_hidden_size",
}
"""Names in released checkpoints -> those of transformers, which win if both are set, but to a default."""
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu2")


@dataclass(frozen=True)
class NemotronHOmniHyperparameters:
    """Hyperparameters of the encoder in models/nemotron_h_omni/model.py, besides the VisionSpec.

    `layer_scale` is the scale of layers whose scales a checkpoint leaves out.
    """

    norm_eps: float
    activation: str
    is_gated: bool
    has_bias: bool
    layer_scale: float
    has_final_norm: bool
    projector_size: int


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `nemotron_h_omni` config.json. ModelError as for `nemotron_h`, and for other encoders."""
    config = _respelled(config)
    left_out = None if config.get("audio_config") is None else SOUNDS
    text = spec_of_text(config, text_spec, "nemotron_h_omni", left_out)
    if config.get("image_token_id") is None:
        return replace(text, left_out=NO_IMAGES)
    vision = {} if config.get("vision_config") is None else part(config, "vision_config")
    return replace(
        text,
        vision=_vision(config, vision, text.hidden_size),
        encoder_hyperparameters=NemotronHOmniHyperparameters(
            norm_eps=number(vision, "layer_norm_eps", 1e-6),
            activation=activation(vision, "hidden_act", "gelu", ACTIVATIONS),
            is_gated=flag(vision, "use_swiglu_ffn", False),
            has_bias=flag(vision, "qkv_bias", True),
            layer_scale=number(vision, "layerscale_value", 1.0),
            has_final_norm=integer(part(config, "text_config"), "num_nextn_predict_layers", 0) > 0,
            projector_size=integer(config, "projector_hidden_size", 4096),
        ),
    )


def _respelled(config: JsonMapping) -> JsonObject:
    old = {name: config[old] for old, name in LEGACY.items() if config.get(old) is not None}
    defaults = {"vision_hidden_size": WIDTH}
    return {**config, **{name: value for name, value in old.items() if config.get(name) in (None, defaults.get(name))}}


def _vision(config: JsonMapping, vision: JsonMapping, text_size: int) -> VisionSpec:
    size, heads, patch = (
        integer(vision, "hidden_size", WIDTH),
        integer(vision, "num_attention_heads", 16),
        integer(vision, "patch_size", 16),
    )
    if (expected := integer(config, "vision_hidden_size", WIDTH)) != size:
        raise ModelError(f"config.json has vision_hidden_size = {expected}; its encoder's hidden_size is {size}")
    if (ratio := number(config, "downsample_ratio", 0.5)) != 0.5:
        raise ModelError(f"config.json has downsample_ratio = {ratio}; supported: 0.5")
    if heads < 1 or size % heads or integer(vision, "head_dim", size // heads) != size // heads:
        raise ModelError(f"config.json has {heads} heads in an encoder of hidden_size {size}; they should divide it")
    side = integer(vision, "max_img_size", 2048) // max(patch, 1)
    prefix = integer(vision, "num_cls_tokens", 3), integer(vision, "num_registers", 7)
    if min(size, patch, side, prefix[0]) < 1 or side**2 > MAX_SIZE:
        raise ModelError(
            f"config.json has an encoder with patches of {patch} pixels, position embeddings for max_img_size = "
            f"{vision.get('max_img_size', 2048)} and num_cls_tokens = {prefix[0]}; none should be 0, and "
            f"max_img_size at most {int(MAX_SIZE**0.5):,} patches"
        )
    ratio = number(vision, "mlp_ratio", 4.0)
    if not 0 < size * ratio <= MAX_SIZE:
        raise ModelError(f"config.json has mlp_ratio = {ratio} in an encoder of hidden_size {size}; supported: above 0")
    inner = int(size * ratio)
    if flag(vision, "use_swiglu_ffn", False):
        inner = -(-int(inner * 2 / 3) // 8) * 8  # of gates and of values
    return VisionSpec(
        hidden_size=size,
        num_layers=integer(vision, "num_hidden_layers", 32),
        num_heads=heads,
        intermediate_size=inner,
        patch_size=patch,
        merge_size=2,
        in_channels=integer(vision, "num_channels", 3),
        out_hidden_size=text_size,
        num_positions=side**2,
        image_token_id=integer(config, "image_token_id"),
        smallest_item=256,
        places="enclosed",
        crops_positions=True,
        num_prefix=sum(prefix),
        enclosing=("<img>", "</img>"),
    )
