"""LFM3-VL: LFM3's layers, and an encoder of images with short convolutions over the grid of patches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    FULL,
    activation,
    axial_theta,
    flag,
    integer,
    layer_kinds,
    number,
    part,
    spec_of_text,
    text_of_kind,
)
from ostinato.models.lfm3 import spec as lfm3
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

TOKENS = {"image": 125030, "video": 125029, "vision_start": 125009, "vision_end": 125010}
THETA = 1e6
"""Defaults of a config.json without these values."""


@dataclass(frozen=True)
class Lfm3VLHyperparameters:
    """Hyperparameters of the encoder in models/lfm3_vl/model.py, besides the VisionSpec.

    `attends` says for each layer of the encoder if it has attention, else a convolution.
    """

    attends: tuple[bool, ...]
    num_kv_heads: int
    norm_eps: float
    theta: float
    projector_size: int
    projector_bias: bool


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `lfm3_vl` config.json, whose text and vision parts are separate dicts."""
    text_of_kind(config, "lfm3")
    vision = part(config, "vision_config")
    plain = spec_of_text(config, lfm3.model_spec, "lfm3_vl", defaults={"model_type": "lfm3"})
    activation(config, "projector_hidden_act", "gelu", ("gelu",))
    spec = _vision(config, vision, plain.hidden_size)
    return replace(
        plain,
        vision=spec,
        encoder_hyperparameters=Lfm3VLHyperparameters(
            attends=_attends(vision, spec.num_layers),
            num_kv_heads=_kv_heads(vision, spec.num_heads),
            norm_eps=number(vision, "norm_eps", 1e-5),
            theta=axial_theta(vision, THETA),
            projector_size=integer(config, "projector_hidden_size", 4096),
            projector_bias=flag(config, "projector_bias", True),
        ),
    )


def _vision(config: JsonMapping, vision: JsonMapping, text_size: int) -> VisionSpec:
    sizes: JsonObject = {
        "hidden_size": integer(vision, "hidden_size", 1024),
        "num_layers": integer(vision, "num_hidden_layers", 14),
        "num_heads": integer(vision, "num_attention_heads", 16),
        "intermediate_size": integer(vision, "intermediate_size", 2560),
        "patch_size": integer(vision, "patch_size", 16),
        "temporal_patch_size": integer(vision, "temporal_patch_size", 2),
        "merge_size": integer(vision, "spatial_merge_size", 2),
        "in_channels": integer(vision, "in_channels", 3),
        "conv_size": integer(vision, "conv_kernel_size", 3),
    }
    if min(sizes.values()) < 1 or sizes["hidden_size"] % (4 * sizes["num_heads"]):
        raise ModelError(
            f"config.json has {sizes['num_heads']} heads in an encoder of hidden_size {sizes['hidden_size']}; they are "
            "rotated by rows and columns, so their size should be a multiple of 4, and no size of the encoder 0"
        )
    if sizes["conv_size"] % 2 == 0:
        raise ModelError(f"config.json has conv_kernel_size = {sizes['conv_size']}; it should be odd")
    return VisionSpec(
        **sizes,
        out_hidden_size=text_size,
        num_positions=0,
        image_token_id=integer(config, "image_token_id", TOKENS["image"]),
        video_token_id=integer(config, "video_token_id", TOKENS["video"]),
        start_token_id=integer(config, "vision_start_token_id", TOKENS["vision_start"]),
        end_token_id=integer(config, "vision_end_token_id", TOKENS["vision_end"]),
    )


def _attends(vision: JsonMapping, count: int) -> tuple[bool, ...]:
    """Return which layers have attention: by `layer_types`, or every second one from the third on."""
    kinds = layer_kinds({"num_hidden_layers": count, **vision}, {"conv": "conv", FULL: FULL})
    return tuple(i > 1 and i % 2 == 0 for i in range(count)) if kinds is None else tuple(kind == FULL for kind in kinds)


def _kv_heads(vision: JsonMapping, num_heads: int) -> int:
    heads = integer(vision, "num_key_value_heads", 8)
    if heads < 1 or num_heads % heads:
        raise ModelError(f"config.json has an encoder of {num_heads} heads, which cannot share {heads} key heads")
    return heads
