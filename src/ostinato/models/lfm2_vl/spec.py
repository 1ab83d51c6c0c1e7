"""LFM2-VL: LFM2's layers, and SigLIP 2 with images of their own proportions (NaFlex, arXiv 2502.14786)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    SiglipHyperparameters,
    activation,
    flag,
    integer,
    part,
    siglip_hyperparameters,
    siglip_sizes,
    spec_of_text,
)
from ostinato.models.lfm2 import spec as lfm2
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec

IMAGE = 396
"""Default of a config.json without `image_token_id`."""


@dataclass(frozen=True)
class Lfm2VLHyperparameters(SiglipHyperparameters):
    """Hyperparameters of the encoder in models/lfm2_vl/model.py, besides the VisionSpec."""

    projector_size: int
    projector_bias: bool
    projector_has_norm: bool


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `lfm2_vl` config.json, whose text and vision parts are separate dicts."""
    text, vision = part(config, "text_config"), part(config, "vision_config")
    for values, default in ((text, "lfm2"), (vision, "siglip2_vision_model")):
        if values.get("model_type", default) != default:
            raise ModelError(f"config.json has a part of model_type = {values['model_type']!r}; supported: {default!r}")
    # The whole model's value overrides the text part's.
    tied = flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True))
    text = {"model_type": "lfm2"} | {name: value for name, value in text.items() if name != "tie_embedding"}
    whole = {**config, "tie_word_embeddings": tied, "text_config": text}
    plain = spec_of_text(whole, lfm2.model_spec, "lfm2_vl")
    activation(config, "projector_hidden_act", "gelu", ("gelu",))
    return replace(
        plain,
        vision=_vision(config, vision, plain.hidden_size),
        encoder_hyperparameters=Lfm2VLHyperparameters(
            **vars(siglip_hyperparameters(vision)),
            projector_size=integer(config, "projector_hidden_size", 2560),
            projector_bias=flag(config, "projector_bias", True),
            projector_has_norm=flag(config, "projector_use_layernorm", True),
        ),
    )


def _vision(config: JsonMapping, vision: JsonMapping, text_size: int) -> VisionSpec:
    sizes = siglip_sizes(vision) | {
        "merge_size": integer(config, "downsample_factor", 2),
        "num_positions": integer(vision, "num_patches", 256),
    }
    if min(sizes.values()) < 1 or sizes["hidden_size"] % sizes["num_heads"]:
        raise ModelError(
            f"config.json has {sizes['num_heads']} heads in an encoder of hidden_size {sizes['hidden_size']}; they "
            "should divide it, and no size of the encoder should be 0"
        )
    if isqrt(sizes["num_positions"]) ** 2 != sizes["num_positions"]:
        raise ModelError(f"config.json has num_patches = {sizes['num_positions']}, which is no square")
    return VisionSpec(
        **sizes,
        out_hidden_size=text_size,
        image_token_id=integer(config, "image_token_id", IMAGE),
        is_naflex=True,
        cuts_tiles=True,
    )
