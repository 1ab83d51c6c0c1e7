"""Gemma 3 of 4B and more (model_type `gemma3`): the text model, and SigLIP with images of one size.

Every image becomes as many tokens, which see each other in both directions.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import integer, part, respelled, siglip_hyperparameters, siglip_sizes, spec_of_text
from ostinato.models.gemma3_text.spec import model_spec as text_spec
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.model import ModelSpec

VOCABULARY, IMAGE_TOKENS = 262_208, 256
TOKENS = {"image_token_index": 262_144, "boi_token_index": 255_999, "eoi_token_index": 256_000}
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma3` config.json. ModelError as for `gemma3_text`, and for windows below an image."""
    config = respelled(config, {name.replace("index", "id"): name for name in TOKENS})
    text = spec_of_text(config, text_spec, "gemma3", defaults={"vocab_size": VOCABULARY})
    vision = part(config, "vision_config")
    encoder = _vision(config, vision, text.hidden_size)
    windows = [layer.attention.window for layer in text.layers if layer.attention and layer.attention.window]
    if min(windows, default=encoder.smallest_item) < encoder.smallest_item:
        raise ModelError(
            f"config.json has sliding_window = {min(windows)}, and images of {encoder.smallest_item} tokens "
            "(mm_tokens_per_image), which see each other; supported: windows of no fewer tokens"
        )
    return replace(
        text,
        vision=encoder,
        layers=tuple(map(sees_images, text.layers)),
        encoder_hyperparameters=siglip_hyperparameters(vision),
    )


def sees_images(layer: LayerSpec) -> LayerSpec:
    """Return the layer with attention in both directions within an image."""
    assert layer.attention is not None, "every layer has attention"
    return replace(layer, attention=replace(layer.attention, sees_ahead=True))


def _vision(config: JsonMapping, vision: JsonMapping, text_size: int) -> VisionSpec:
    sizes, side = siglip_sizes(vision), integer(vision, "image_size", 224)
    size, heads, patch = sizes["hidden_size"], sizes["num_heads"], sizes["patch_size"]
    count = integer(config, "mm_tokens_per_image", IMAGE_TOKENS)
    patches = side // max(patch, 1)
    merge = patches // max(isqrt(max(count, 0)), 1)
    if min(side, patch, count) < 1 or (merge * isqrt(count)) ** 2 != patches**2 or isqrt(count) ** 2 != count:
        raise ModelError(
            f"config.json has images of {side} pixels, patches of {patch} and mm_tokens_per_image = {count}; "
            "supported: a square number of tokens, whose side divides that of the patches"
        )
    if min(size, heads) < 1 or size % heads:
        raise ModelError(f"config.json has {heads} heads in an encoder of hidden_size {size}; they should divide it")
    return VisionSpec(
        **sizes,
        merge_size=merge,
        out_hidden_size=text_size,
        num_positions=patches**2,
        image_token_id=integer(config, "image_token_index", TOKENS["image_token_index"]),
        start_token_id=integer(config, "boi_token_index", TOKENS["boi_token_index"]),
        end_token_id=integer(config, "eoi_token_index", TOKENS["eoi_token_index"]),
        smallest_item=count,
        image_side=patches * patch,
        is_bidirectional=True,
        places="start",
    )
