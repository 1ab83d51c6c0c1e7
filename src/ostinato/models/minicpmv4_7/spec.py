"""MiniCPM-V 4.7: Qwen3.5's text model, and SigLIP 2 with windows of patches that are merged within the encoder.

Large images are cut into slices, and tokens of images have positions on a canvas. Videos are not taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    SiglipHyperparameters,
    integer,
    part,
    siglip_hyperparameters,
    siglip_sizes,
    spec_of_text,
    text,
    text_of_kind,
    with_sections,
)
from ostinato.models.qwen3_5.spec import SECTIONS
from ostinato.models.qwen3_5_text.spec import model_spec as text_spec
from ostinato.plan.layer_specs import CanvasTokens, VisionSpec
from ostinato.plan.model import ModelSpec

FULL_MERGE, NO_WINDOWS = "16x", "4x"
"""Values of `downsample_mode`: patches per token."""


@dataclass(frozen=True)
class MiniCPMVHyperparameters(SiglipHyperparameters):
    """Hyperparameters of the encoder in models/minicpmv4_7/model.py, besides the VisionSpec."""

    merges_behind: int
    """Layer behind which windows are merged."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `minicpmv4_7` config.json. ModelError as for `qwen3_5_text`, and for other encoders."""
    of_text = text_of_kind(config, "qwen3_5_text")
    plain = spec_of_text(config, text_spec, "minicpmv4_7", default_tied=False)
    assert plain.rope is not None, "its attention is rotated"
    vision = {} if config.get("vision_config") is None else part(config, "vision_config")
    spec = _vision(config, vision, plain.hidden_size)
    behind = integer(config, "insert_layer_id", 6)
    if spec.has_windows and behind >= spec.num_layers:
        raise ModelError(
            f"config.json has insert_layer_id = {behind} in an encoder of {spec.num_layers} layers; it should be below"
        )
    return replace(
        plain,
        rope=with_sections(plain.rope, of_text.get("rope_scaling") or of_text.get("rope_parameters") or {}, SECTIONS),
        vision=spec,
        encoder_hyperparameters=MiniCPMVHyperparameters(**vars(siglip_hyperparameters(vision)), merges_behind=behind),
    )


def _vision(config: JsonMapping, vision: JsonMapping, text_size: int) -> VisionSpec:
    mode = text(config, "downsample_mode", FULL_MERGE)
    if mode not in (FULL_MERGE, NO_WINDOWS):
        raise ModelError(f"config.json has downsample_mode = {mode!r}; supported: {FULL_MERGE}, {NO_WINDOWS}")
    for source, name in ((config, "merge_kernel_size"), (vision, "window_kernel_size")):
        if list(source.get(name) or (2, 2)) != [2, 2]:
            raise ModelError(f"config.json has {name} = {source[name]!r}; supported: [2, 2]")
    if (times := integer(config, "merger_times", 1)) != 1:
        raise ModelError(f"config.json has merger_times = {times}; supported: 1")
    sizes = siglip_sizes(vision)
    size, heads, patch = sizes["hidden_size"], sizes["num_heads"], sizes["patch_size"]
    side = integer(vision, "image_size", 224) // max(patch, 1)
    if min(size, heads, patch, side) < 1 or size % heads:
        raise ModelError(
            f"config.json has {heads} heads in an encoder of hidden_size {size}, and patches of {patch} pixels in "
            "images of image_size; heads should divide it, and patches be no larger than images"
        )
    tokens = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
    canvas = CanvasTokens(*(integer(config, name) for name in tokens))
    return VisionSpec(
        **sizes,
        merge_size=4 if mode == FULL_MERGE else 2,
        out_hidden_size=text_size,
        num_positions=side**2,
        image_token_id=integer(config, "image_token_id"),
        start_token_id=canvas.image_start,
        end_token_id=canvas.image_end,
        places="enclosed",
        has_windows=mode == FULL_MERGE,
        has_nearest_positions=True,
        canvas=canvas,
    )
