"""Qwen3-VL (arXiv 2511.21631): Qwen3's layers with positions in time, height and width, and an encoder of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import (
    activation,
    axial_theta,
    flag,
    flag_is,
    integer,
    part,
    respelled,
    sparse_layers,
    spec_of_text,
    with_sections,
)
from ostinato.models.llama.spec import llama_spec, qwen_experts
from ostinato.plan.layer_specs import ExpertsSpec, VisionSpec
from ostinato.plan.model import ModelSpec

TEXT_THETA = 500000.0
SECTIONS = (24, 20, 20)
TOKENS = {"image": 151655, "video": 151656, "vision_start": 151652, "vision_end": 151653}
DEEPSTACK = (8, 16, 24)
"""Defaults of a config.json without these values."""
OTHER_NAMES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
"""Names that transformers takes for those of the encoder's sizes."""


@dataclass(frozen=True)
class Qwen3VLHyperparameters:
    """Hyperparameters of the encoder in models/qwen3_vl/model.py, besides the VisionSpec."""

    theta: float
    activation: str


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_vl` config.json, whose text and vision parts are separate dicts."""
    return vl_spec(config, "qwen3_vl", lambda text: _text_spec(text, head_dim=128))


def qwen3_vl_moe_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_vl_moe` config.json, with experts in most layers."""
    return vl_spec(config, "qwen3_vl_moe", _sparse_text_spec)


def _sparse_text_spec(text: JsonObject) -> ModelSpec:
    flag_is(text, "norm_topk_prob", True)
    experts, are_sparse = qwen_experts(text), sparse_layers(text, integer(text, "num_hidden_layers"))
    return _text_spec(text, experts=[experts if is_sparse else None for is_sparse in are_sparse])


def _text_spec(
    text: JsonObject, head_dim: int | None = None, experts: Sequence[ExpertsSpec | None] | None = None
) -> ModelSpec:
    """Return the spec of a text part: layers of Qwen3, all over the whole context.

    `head_dim` is the default of a config.json without it.
    """
    bias = flag(text, "attention_bias", False)
    return llama_spec(
        text,
        "qwen3_vl",
        qkv_bias=bias,
        head_dim=head_dim,
        default_theta=TEXT_THETA,
        experts=experts,
        qk_norms="of_heads",
    )


def vl_spec(
    config: JsonObject,
    architecture: str,
    text_spec: Callable[[JsonObject], ModelSpec],
    *,
    tokens: Mapping[str, int] = TOKENS,
    deepstack: tuple[int, ...] = DEEPSTACK,
    sections: tuple[int, int, int] = SECTIONS,
) -> ModelSpec:
    """Return the spec of the whole model, with the text part that `text_spec` reads.

    `tokens`, `deepstack` and `sections` are defaults for a config.json without these values.
    """
    text, vision = part(config, "text_config"), respelled(part(config, "vision_config"), OTHER_NAMES)
    plain = spec_of_text(config, text_spec, architecture, default_tied=False)
    assert plain.rope is not None, "its attention is rotated"
    return replace(
        plain,
        rope=with_sections(plain.rope, text.get("rope_scaling") or text.get("rope_parameters") or {}, sections),
        encoder_hyperparameters=Qwen3VLHyperparameters(
            theta=axial_theta(vision, 10000.0),
            activation=activation(vision, "hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu")),
        ),
        vision=_vision(config, vision, plain.hidden_size, tokens, _deepstack(vision, deepstack, plain.num_layers)),
    )


def _vision(
    config: JsonObject, vision: JsonObject, text_size: int, tokens: Mapping[str, int], deepstack: tuple[int, ...]
) -> VisionSpec:
    size, depth = integer(vision, "hidden_size", 1152), integer(vision, "depth", 27)
    heads, inner = integer(vision, "num_heads", 16), integer(vision, "intermediate_size", 4304)
    positions = integer(vision, "num_position_embeddings", 2304, least=1)
    out, merge = integer(vision, "out_hidden_size", 3584), integer(vision, "spatial_merge_size", 2)
    if out != text_size:
        raise ModelError(f"config.json has out_hidden_size = {out}; the text part's hidden_size is {text_size}")
    if heads < 1 or size % (4 * heads):
        raise ModelError(
            f"config.json has {heads} heads in an encoder of hidden_size {size}; they are rotated by rows and columns, "
            "so their size should be a multiple of 4"
        )
    channels, patch = integer(vision, "in_channels", 3), integer(vision, "patch_size", 16)
    temporal = integer(vision, "temporal_patch_size", 2)
    if min(channels, patch, temporal, merge) < 1:
        raise ModelError("config.json has an encoder without channels, or of patches or merged patches without extent")
    return VisionSpec(
        hidden_size=size,
        num_layers=depth,
        num_heads=heads,
        intermediate_size=inner,
        patch_size=patch,
        temporal_patch_size=temporal,
        merge_size=merge,
        in_channels=channels,
        out_hidden_size=out,
        num_positions=positions,
        deepstack_layers=deepstack,
        image_token_id=integer(config, "image_token_id", tokens["image"]),
        video_token_id=integer(config, "video_token_id", tokens["video"]),
        start_token_id=integer(config, "vision_start_token_id", tokens["vision_start"]),
        end_token_id=integer(config, "vision_end_token_id", tokens["vision_end"]),
    )


def _deepstack(vision: JsonObject, default: tuple[int, ...], num_text_layers: int) -> tuple[int, ...]:
    given, depth = vision.get("deepstack_visual_indexes"), integer(vision, "depth", 27)
    layers = tuple(default if given is None else given)
    are_layers = all(type(layer) is int and 0 <= layer < depth for layer in layers)
    if not are_layers or list(layers) != sorted(set(layers)) or len(layers) > num_text_layers:
        raise ModelError(
            f"config.json has deepstack_visual_indexes = {list(layers)}; they should be layers of the encoder "
            f"(0 to {depth - 1}), ascending, and no more than the text part's {num_text_layers}"
        )
    return layers
