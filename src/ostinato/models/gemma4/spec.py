"""Gemma 4 (model_type `gemma4`): the text model, and an encoder of images of any proportions.

The encoder of sounds that a checkpoint may have is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import activation, axial_theta, flag, flag_is, integer, number, part, spec_of_text
from ostinato.models.gemma3.spec import sees_images
from ostinato.models.gemma4_text.spec import model_spec as text_spec
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.model import ModelSpec

SOUNDS = "the encoder of sounds is not run; requests have none"

TOKENS = {"image_token_id": 258_880, "boi_token_id": 255_999, "eoi_token_id": 258_882, "video_token_id": 258_884}
THETA = 100.0
"""Defaults of a config.json without these values."""


@dataclass(frozen=True)
class Gemma4VLHyperparameters:
    """Hyperparameters of the encoder in models/gemma4/model.py, besides the VisionSpec."""

    norm_eps: float
    theta: float
    standardises: bool
    """True if the mean of a token's patches is shifted and scaled by learned vectors."""
    clips: bool
    """True if inputs and outputs of the blocks' linear layers are clipped to bounds that the checkpoint has."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma4` config.json. ModelError as for `gemma4_text`, and for other encoders."""
    text = text_part(config, text_spec, "gemma4")
    if config.get("vision_config") is None:
        return text
    vision = part(config, "vision_config")
    hyper = Gemma4VLHyperparameters(
        norm_eps=number(vision, "rms_norm_eps", 1e-6),
        theta=axial_theta(vision, THETA),
        standardises=flag(vision, "standardize", False),
        clips=flag(vision, "use_clipped_linears", False),
    )
    return with_images(replace(text, encoder_hyperparameters=hyper), config, _encoder_sizes(vision))


def text_part(config: JsonObject, text_spec: Callable[[JsonObject], ModelSpec], architecture: str) -> ModelSpec:
    """Return the spec of a model's text, which says that an encoder of sounds is left out if there is one."""
    return spec_of_text(config, text_spec, architecture, None if config.get("audio_config") is None else SOUNDS)


def with_images(text: ModelSpec, config: JsonObject, sizes: Mapping[str, Any], by_default: object = None) -> ModelSpec:
    """Return the spec with an encoder of these sizes, and the tokens and directions of images in config.json.

    `by_default` is the value of a text part without `use_bidirectional_attention`.
    """
    of_text = part(config, "text_config")
    is_bidirectional = of_text.get("use_bidirectional_attention", by_default) == "vision"
    vision = VisionSpec(
        **sizes,
        in_channels=3,
        out_hidden_size=text.hidden_size,
        image_token_id=integer(config, "image_token_id", TOKENS["image_token_id"]),
        video_token_id=_video_token(config, text.vocab_size),
        start_token_id=integer(config, "boi_token_id", TOKENS["boi_token_id"]),
        end_token_id=integer(config, "eoi_token_id", TOKENS["eoi_token_id"]),
        is_bidirectional=is_bidirectional,
        places="enclosed",
        text_token_id=integer(of_text, "pad_token_id", 0),
        positions_by_axis=True,
    )
    return replace(
        text, vision=vision, layers=tuple(map(_sees_images, text.layers)) if is_bidirectional else text.layers
    )


def _video_token(config: JsonObject, vocab_size: int) -> int | None:
    """Return the token of videos; None if it is null or beyond the vocabulary, for a model that takes none."""
    if config.get("video_token_id", 0) is None:
        return None
    token_id = integer(config, "video_token_id", TOKENS["video_token_id"])
    return token_id if token_id < vocab_size else None


def _sees_images(layer: LayerSpec) -> LayerSpec:
    """Return the layer with attention in both directions within an image, which those without a window do not have."""
    return sees_images(layer) if layer.attention is not None and layer.attention.window else layer


def _encoder_sizes(vision: JsonMapping) -> JsonObject:
    activation(vision, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    flag_is(vision, "attention_bias", False)
    sizes: JsonObject = {
        "hidden_size": integer(vision, "hidden_size", 768),
        "num_layers": integer(vision, "num_hidden_layers", 16),
        "num_heads": integer(vision, "num_attention_heads", 12),
        "intermediate_size": integer(vision, "intermediate_size", 3072),
        "patch_size": integer(vision, "patch_size", 16),
        "merge_size": integer(vision, "pooling_kernel_size", 3),
        "num_positions": 2 * integer(vision, "position_embedding_size", 10 * 1024),
    }
    size, heads = sizes["hidden_size"], sizes["num_heads"]
    kv_heads, head_dim = integer(vision, "num_key_value_heads", 12), integer(vision, "head_dim", 64)
    if min(sizes.values()) < 1 or kv_heads != heads or head_dim * heads != size or head_dim % 4:
        raise ModelError(
            f"config.json has an encoder of hidden_size {size} with {heads} heads of {head_dim}, {kv_heads} of keys; "
            "supported: as many of keys, whose size is a multiple of 4, and which together are as wide as hidden_size"
        )
    return sizes
