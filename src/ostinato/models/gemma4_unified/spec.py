"""Gemma 4 Unified (model_type `gemma4_unified`): Gemma 4's text, and images without an encoder's blocks.

A token's pixels are one patch. Sounds, which have no encoder either, are not run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import integer, number, part
from ostinato.models.gemma4.spec import text_part, with_images
from ostinato.models.gemma4_text.spec import gemma4_unified_text_spec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class UnifiedHyperparameters:
    """Hyperparameters of the embedder in models/gemma4_unified/model.py, besides the VisionSpec."""

    projector_norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4_unified` config.json. ModelError as for `gemma4_text`, and for other widths."""
    text = text_part(config, gemma4_unified_text_spec, "gemma4_unified")
    if config.get("vision_config") is None:
        return text
    vision = part(config, "vision_config")
    hyper = UnifiedHyperparameters(number(vision, "rms_norm_eps", 1e-6))
    text = replace(text, encoder_hyperparameters=hyper)
    return with_images(text, config, _embedder_sizes(vision), by_default="vision")


def _embedder_sizes(vision: JsonMapping) -> JsonObject:
    """Return the sizes of an encoder of no layers, whose patches have the pixels of a whole token."""
    size, patch = integer(vision, "mm_embed_dim", 3840), integer(vision, "patch_size", 16)
    side, count = patch * integer(vision, "pooling_kernel_size", 3), integer(vision, "mm_posemb_size", 1120)
    projected, given = integer(vision, "output_proj_dims", 3840), integer(vision, "model_patch_size", side)
    if min(size, side, count) < 1 or projected != size or given != side:
        raise ModelError(
            f"config.json has mm_embed_dim = {size}, output_proj_dims = {projected}, patch_size times "
            f"pooling_kernel_size = {side}, model_patch_size = {given} and mm_posemb_size = {count}; the first two and "
            "the next two should be the same, and all above 0"
        )
    return {
        "hidden_size": size,
        "num_layers": 0,
        "num_heads": 1,
        "intermediate_size": 0,
        "patch_size": side,
        "merge_size": 1,
        "num_positions": 2 * count,
        "is_encoder_free": True,
    }
