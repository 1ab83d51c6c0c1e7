"""Tiny random checkpoints of models with an encoder of images, made with transformers, which is also the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from ostinato.formats.mapped_files import SINGLE
from ostinato.graphs.buffers import EncoderBuffers
from ostinato.layers.allocation import WeightAllocator
from ostinato.media.media_item import MediaItem
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import model_spec, read_config
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import Ops, select_ops
from ostinato.ops.operations import OPERATIONS
from ostinato.ops.step_inputs import EncoderInputs, LayerCache, StepInputs
from ostinato.plan.device.detect import detect
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec
from ostinato.runner.image_encoder import patch_positions, write_encoder_inputs
from tests.support import recipes
from tests.support.checkpoints import QwenHeadOracle, qwen_head_oracle, randomize
from tests.support.folders import shared_folder
from tests.support.recipes import COMMON, VOCAB_SIZE

IMAGE, VIDEO, START, END = range(VOCAB_SIZE - 4, VOCAB_SIZE)
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
CPU = TorchArrays("cpu")
BLOCK_SIZE = 16

TEXT: dict[str, Any] = COMMON | {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 3000.0,
        "mrope_section": [5, 4, 2],
        "mrope_interleaved": True,
    },
}
"""One angle of the 12 belongs to time though the sections leave it to nobody."""

VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2],
}


def qwen3_vl() -> PretrainedConfig:
    text = TEXT | {"attention_bias": True}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=VISION, **TOKENS, tie_word_embeddings=True)


def qwen3_vl_moe() -> PretrainedConfig:
    """Experts in the first and the last layer; patches of other sizes, and another activation."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1, 2]}
    vision = VISION | {
        "deepstack_visual_indexes": [1, 2, 3],
        "num_heads": 2,
        "temporal_patch_size": 1,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
    }
    return transformers.Qwen3VLMoeConfig(text_config=TEXT | experts, vision_config=vision, **TOKENS)


DELTA_NETS: dict[str, Any] = COMMON | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 3000.0,
        "partial_rotary_factor": 0.75,
        "mrope_section": [5, 4, 2],
        "mrope_interleaved": True,
    },
}
PLAIN_VISION = {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"}


def qwen3_5() -> PretrainedConfig:
    """Delta nets beside attention, three quarters of whose heads are rotated; an encoder without DeepStack; a
    prediction head."""
    text = DELTA_NETS | {"intermediate_size": 96, "attention_bias": True, "mtp_num_hidden_layers": 1}
    return transformers.Qwen3_5Config(text_config=text, vision_config=PLAIN_VISION, **TOKENS, tie_word_embeddings=True)


def qwen3_5_moe() -> PretrainedConfig:
    """Experts beside a shared one in every layer, and in a prediction head; one position more than a square has."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    text = DELTA_NETS | experts | {"shared_expert_intermediate_size": 28, "mtp_num_hidden_layers": 1}
    vision = PLAIN_VISION | {"num_heads": 2, "temporal_patch_size": 1, "num_position_embeddings": 50}
    return transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, **TOKENS)


def lfm3_vl() -> PretrainedConfig:
    """Convolutions over patches, and attention whose heads share keys; text with windows, in a line."""
    text = recipes.lfm3().to_dict() | {"tie_word_embeddings": True}
    vision = {
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "patch_size": 4,
        "norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
    }
    return transformers.Lfm3VlConfig(
        text_config=text, vision_config=vision, **TOKENS, projector_hidden_size=100, tie_word_embeddings=True
    )


def lfm2_vl() -> PretrainedConfig:
    """SigLIP 2 with its pooling head, which no token needs; positions that are resized with antialiasing."""
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "patch_size": 4,
        "num_patches": 36,
        "layer_norm_eps": 1e-3,
    }
    text = recipes.lfm2().to_dict()
    return transformers.Lfm2VlConfig(
        text_config=text, vision_config=vision, **TOKENS, projector_hidden_size=100, tie_word_embeddings=False
    )


def gemma3() -> PretrainedConfig:
    """SigLIP with images of one size, whose 9 tokens see each other; windows shorter than the prompts."""
    text = recipes.gemma3_text().to_dict() | {"attention_bias": False, "tie_word_embeddings": False}
    vision = {
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 24,
        "patch_size": 4,
        "layer_norm_eps": 1e-3,
        "vision_use_head": False,
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=9,
        tie_word_embeddings=False,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )


GEMMA4_TOKENS = {
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
    "video_token_id": VIDEO,
    "audio_token_id": VOCAB_SIZE + 9,
}


def gemma4() -> PretrainedConfig:
    """Positions by column and row, small embeddings, and windows shorter than an image, whose tokens see each other."""
    text = recipes.gemma4_text().to_dict() | {"use_bidirectional_attention": "vision", "sliding_window": 10}
    vision = {
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 40,
        "rms_norm_eps": 1e-3,
        "standardize": True,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
    }
    text |= {"pad_token_id": 7}
    return transformers.Gemma4Config(text_config=text, vision_config=vision, **GEMMA4_TOKENS, tie_word_embeddings=True)


def gemma4_causal() -> PretrainedConfig:
    """Tokens of images that see only what is before them, linears that clip, and experts in the text part."""
    config = gemma4()
    text = recipes.gemma4().text_config.to_dict()
    vision = config.vision_config.to_dict() | {"standardize": False, "use_clipped_linears": True}
    return transformers.Gemma4Config(text_config=text, vision_config=vision, **GEMMA4_TOKENS, tie_word_embeddings=False)


def gemma4_unified() -> PretrainedConfig:
    """A token for each patch, whose pixels no block encodes; windows shorter than an image."""
    text = recipes.gemma4_unified_text().to_dict() | {"sliding_window": 10, "pad_token_id": 7}
    text |= {"use_bidirectional_attention": "vision"}
    vision = {
        "mm_embed_dim": 56,
        "output_proj_dims": 56,
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "mm_posemb_size": 40,
        "rms_norm_eps": 1e-3,
    }
    return transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, **GEMMA4_TOKENS, tie_word_embeddings=False
    )


def nemotron_h_omni() -> PretrainedConfig:
    """RADIO with class tokens and registers, which are no whole tokens, and biases."""
    vision = {
        "model_type": "radio",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "patch_size": 4,
        "max_img_size": 28,
        "num_cls_tokens": 2,
        "num_registers": 3,
        "mlp_ratio": 1.7,
        "layer_norm_eps": 1e-3,
        "video_temporal_patch_size": 2,
    }
    return transformers.AutoConfig.for_model(
        "nemotron_h_omni",
        text_config=recipes.nemotron_h().to_dict(),
        vision_config=vision,
        vision_hidden_size=48,
        projector_hidden_size=100,
        image_token_id=IMAGE,
    )


def nemotron_h_omni_gated() -> PretrainedConfig:
    """A norm behind the encoder, since a prediction head belongs to the text part; gated MLPs, queries without biases,
    and a prefix of whole tokens."""
    config = nemotron_h_omni().to_dict()
    text = recipes.nemotron_h().to_dict() | {"num_nextn_predict_layers": 1}
    vision = config["vision_config"] | {"use_swiglu_ffn": True, "qkv_bias": False, "num_registers": 2}
    sizes = {"vision_hidden_size": 48, "projector_hidden_size": 100, "image_token_id": IMAGE}
    return transformers.AutoConfig.for_model("nemotron_h_omni", text_config=text, vision_config=vision, **sizes)


SLICES = {"slice_start_id": VOCAB_SIZE - 5, "slice_end_id": VOCAB_SIZE - 6, "newline_id": VOCAB_SIZE - 7}
CANVAS = {"image_token_id": IMAGE, "image_start_id": START, "image_end_id": END, **SLICES}


def minicpmv4_7() -> PretrainedConfig:
    """Windows that are merged behind the second layer of three; tokens of images on a canvas; delta nets."""
    vision = {
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "patch_size": 4,
        "image_size": 28,
        "layer_norm_eps": 1e-3,
    }
    text = {**DELTA_NETS, "model_type": "qwen3_5_text", "intermediate_size": 96, "attention_bias": True}
    return transformers.AutoConfig.for_model(
        "minicpmv4_7", text_config=text, vision_config=vision, insert_layer_id=1, tie_word_embeddings=False, **CANVAS
    )


def minicpmv4_7_4x() -> PretrainedConfig:
    """No window is merged, so that a token is four patches; another activation, and two layers of text."""
    config = minicpmv4_7().to_dict()
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    vision = config["vision_config"] | {"hidden_act": "gelu", "image_size": 33}
    sizes = {"downsample_mode": "4x", "tie_word_embeddings": False, **CANVAS}
    return transformers.AutoConfig.for_model(
        "minicpmv4_7", text_config=config["text_config"] | layers, vision_config=vision, **sizes
    )


VL_RECIPES: dict[str, Callable[[], PretrainedConfig]] = {
    each.__name__: each
    for each in (
        *(qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe, lfm3_vl, lfm2_vl, gemma3, gemma4, gemma4_causal),
        *(gemma4_unified, nemotron_h_omni, nemotron_h_omni_gated, minicpmv4_7, minicpmv4_7_4x),
    )
}
IN_A_LINE = (
    *("lfm3_vl", "lfm2_vl", "gemma3", "gemma4", "gemma4_causal", "gemma4_unified"),
    *("nemotron_h_omni", "nemotron_h_omni_gated"),
)
"""Recipes whose tokens of images have positions in a line."""


@cache
def vl_oracle(name: str) -> PreTrainedModel:
    """transformers' model of a recipe, float32, with random weights. Treat it as read-only."""
    model = transformers.AutoModelForImageTextToText.from_config(VL_RECIPES[name](), dtype=torch.float32)
    randomize(model, 0)
    return model.eval()


@cache
def vl_checkpoint(name: str) -> Path:
    """A directory with the oracle's weights, saved by transformers, and those of the head, if there is one. Treat it as
    read-only."""
    directory = shared_folder(name)
    vl_oracle(name).save_pretrained(directory)
    if has_head(name):
        file = directory / SINGLE
        save_file(load_file(file) | vl_head_oracle(name).tensors(), file, metadata={"format": "pt"})
    return directory


def has_head(name: str) -> bool:
    return bool(getattr(VL_RECIPES[name]().text_config, "mtp_num_hidden_layers", 0))


@cache
def vl_head_oracle(name: str) -> QwenHeadOracle:
    """The prediction head of a recipe that has one. Treat it as read-only."""
    return qwen_head_oracle(VL_RECIPES[name]().text_config, seed=0)


def vl_spec(name: str) -> ModelSpec:
    return model_spec(read_config(vl_checkpoint(name)))


def vl_model(name: str, ops: Ops | None = None) -> CausalLM:
    model = build_model(WeightAllocator(ops or select_ops({}), TorchArrays("cpu"), "float32"), vl_spec(name))
    load_weights(model, vl_checkpoint(name))
    return model


def ops_of(name: str, kind: str) -> Ops:
    """References, or whatever has a native kernel."""
    isa = detect("cpu").native.isa
    if kind == "reference":
        return select_ops({})
    if isa is None:
        pytest.skip("no native module is built: run make native")
    return select_ops({op: "native" if OPERATIONS[op].native else "reference" for op in vl_spec(name).ops}, isa)


def random_items(name: str, grids: Sequence[tuple[int, int]], seed: int) -> list[MediaItem]:
    """Images of these sizes in patches, twice as high and wide if tokens are, or of the model's only size."""
    vision = vl_spec(name).vision
    assert vision is not None
    if vision.is_encoder_free:
        # A patch has the pixels of four.
        grids = [(height // 2, width // 2) for height, width in grids]
    if vision.merge_size == 4:
        grids = [(2 * height, 2 * width) for height, width in grids]
    if vision.image_side:
        grids = [(vision.image_side // vision.patch_size,) * 2] * len(grids)
    generator = np.random.default_rng(seed)
    return [
        MediaItem(
            patches=generator.standard_normal((height * width, vision.patch_elements), dtype=np.float32),
            grid=(height, width),
            num_tokens=height * width // vision.patches_per_token,
            digest=f"{seed}-{i}",
        )
        for i, (height, width) in enumerate(grids)
    ]


def types_of(name: str, ids: torch.Tensor) -> dict[str, Any]:
    """What tells transformers' model of a recipe which of the tokens [1, tokens] are those of images and videos."""
    if name.startswith("nemotron"):
        return {}
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return {"token_type_ids": types} if name == "gemma3" else seen_by(vl_oracle(name), types)


def seen_by(model: PreTrainedModel, types: torch.Tensor) -> dict[str, Any]:
    """What makes a model see tokens of these types [1, tokens].

    The masks of Gemma 4 Unified are those of its `create_masks_for_generate`, as vLLM and Google's own implementation
    have them. Those of its `forward` in transformers 5.23 are Gemma 3's.
    """
    if model.config.model_type != "gemma4_unified":
        return {"mm_token_type_ids": types}
    embedded = torch.empty(*types.shape, 0)
    masks = model.create_masks_for_generate(model.config, embedded, None, None, None, mm_token_type_ids=types)
    return {"attention_mask": masks}


def image_inputs(name: str, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """What transformers' model of a recipe takes for images."""
    vision = vl_spec(name).vision
    assert vision is not None
    return inputs_of_images(vision, items)


def as_videos(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers' model takes for videos, from what it takes for images. Gemma 4's frames are those of one."""
    names = {
        "pixel_values": "pixel_values_videos",
        "image_grid_thw": "video_grid_thw",
        "image_position_ids": "video_position_ids",
    }
    given = {names.get(key, key): value for key, value in inputs.items()}
    if model.config.model_type.startswith("gemma4"):
        given["num_frames_per_video"] = torch.tensor([len(inputs["pixel_values"])])
    return given


def inputs_of_images(vision: VisionSpec, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """What transformers' model with such an encoder takes for images."""
    patches = [torch.from_numpy(np.asarray(item.patches)) for item in items]
    if vision.image_side:
        whole = torch.zeros(len(items), vision.in_channels, vision.image_side, vision.image_side)
        for own, item, values in zip(whole, items, patches, strict=True):
            tiles = own.unfold(1, vision.patch_size, vision.patch_size).unfold(2, vision.patch_size, vision.patch_size)
            for (row, column), patch in zip(patch_positions(item.grid, vision.merge_size), values, strict=True):
                tiles[:, row, column] = patch.view(vision.in_channels, vision.patch_size, vision.patch_size)
        return {"pixel_values": whole}
    if vision.canvas is not None:
        # The pixels of a patch's rows, patch after patch.
        sizes, side = torch.tensor([item.grid for item in items]), vision.patch_size
        rows = torch.cat([_row_by_row(item, vision) for item in items])
        pixels = rows.view(len(rows), vision.in_channels, side, side).permute(1, 2, 0, 3)
        return {"pixel_values": pixels.reshape(1, vision.in_channels, side, -1), "target_sizes": sizes}
    if vision.crops_positions:
        grids = torch.tensor([item.grid for item in items])
        return {"pixel_values": torch.cat([_row_by_row(item, vision) for item in items]), "image_grid_hw": grids}
    if not vision.is_naflex and not vision.positions_by_axis:
        grids = torch.tensor([(1, *item.grid) for item in items])
        return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}
    # Row by row, and padded to one length.
    longest = max(map(len, patches))
    pixels = torch.zeros(len(items), longest, vision.patch_elements)
    mask = torch.zeros(len(items), longest, dtype=torch.int64)
    for own, seen, item, values in zip(pixels, mask, items, patches, strict=True):
        rows, columns = torch.from_numpy(patch_positions(item.grid, vision.merge_size)).unbind(1)
        own[rows * item.grid[1] + columns] = values
        seen[: len(values)] = 1
    if vision.positions_by_axis:
        places = torch.full((len(items), longest, 2), -1)
        for own_places, item in zip(places, items, strict=True):
            rows, columns = torch.arange(item.grid[0]), torch.arange(item.grid[1])
            grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
            own_places[: len(item.patches)] = grid.reshape(-1, 2)
        # Gemma 4's model makes the range of 0 to 1 that of -1 to 1.
        return {"pixel_values": pixels if vision.is_encoder_free else pixels / 2 + 0.5, "image_position_ids": places}
    shapes = torch.tensor([item.grid for item in items])
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _row_by_row(item: MediaItem, vision: VisionSpec) -> torch.Tensor:
    """An image's patches, [patches, elements], which are those of one token after the other."""
    patches = torch.from_numpy(np.asarray(item.patches))
    rows, columns = torch.from_numpy(patch_positions(item.grid, vision.merge_size, vision.has_windows)).unbind(1)
    ordered = torch.empty_like(patches)
    ordered[rows * item.grid[1] + columns] = patches
    return ordered


@torch.inference_mode()
def oracle_encode(name: str, items: Sequence[MediaItem]) -> torch.Tensor:
    """[output tokens, rows, hidden]"""
    model, inputs = getattr(vl_oracle(name), "model", vl_oracle(name)), image_inputs(name, items)
    if not hasattr(model, "visual"):
        encoded = model.get_image_features(**inputs).pooler_output
        return torch.cat(list(encoded)).unsqueeze(1)
    out = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    return torch.stack((out.pooler_output, *(getattr(out, "deepstack_features", None) or ())), dim=1)


def poisoned_memory(spec: ModelSpec, blocks: int, encoded: torch.Tensor) -> list[LayerCache]:
    """That of one request, its blocks and three slots, all NaN, and behind it the cells of `encoded`, which follow the
    null cell."""
    memory = []
    for layer in spec.layers:
        if layer.attention is not None and layer.attention.keys_of is not None:
            memory.append(memory[layer.attention.keys_of])
            continue
        if layer.attention is None:
            arrays = () if layer.mixer is None else layer.mixer.state.arrays
            states = {array.name: torch.full((3, *array.shape), torch.nan) for array in arrays}
            memory.append(LayerCache(states=states))
            continue
        shape = (blocks, BLOCK_SIZE, layer.attention.num_kv_heads, layer.attention.head_dim)
        memory.append(LayerCache(k_cache=torch.full(shape, torch.nan), v_cache=torch.full(shape, torch.nan)))
    cells = torch.cat((torch.full_like(encoded[:1], torch.nan), encoded, torch.full_like(encoded[:1], torch.nan)))
    return [*memory, LayerCache(media=cells)]


def with_media(
    inputs: StepInputs, rope_positions: torch.Tensor, media_cells: torch.Tensor, vision: VisionSpec
) -> StepInputs:
    """A step with images, each of which the step has whole if its tokens see each other."""
    if vision.text_token_id is not None:
        inputs.token_ids[media_cells > 0] = vision.text_token_id
    last_seen = inputs.positions.clone()
    for i in reversed(range(len(media_cells) - 1)):
        if media_cells[i] and media_cells[i + 1]:
            last_seen[i] = last_seen[i + 1]
    of_images = {"rope_positions": rope_positions.contiguous(), "media_cells": media_cells}
    return replace(inputs, **of_images, last_seen=last_seen.int())


def encoder_inputs(items: Sequence[MediaItem], vision: VisionSpec) -> EncoderInputs:
    """Images in buffers as large as they are."""
    rows = vision.rows_of(sum(item.grid[0] * item.grid[1] // vision.patches_per_token for item in items), len(items))
    segments = vision.segments_of(len(items))
    buffers = EncoderBuffers(rows, segments, vision.patch_elements, CPU, "float32", vision.taps, vision.has_windows)
    inputs = write_encoder_inputs(buffers, items, vision)
    buffers.pad(rows, segments, rows)
    return inputs


def of_images(encoded: torch.Tensor, items: Sequence[MediaItem], vision: VisionSpec) -> torch.Tensor:
    """What an encoder gives without what it makes of prefixes, [output tokens, rows, hidden]."""
    tokens = [item.grid[0] * item.grid[1] // vision.patches_per_token for item in items]
    parts = encoded.split([vision.prefix_tokens + count for count in tokens])
    return torch.cat([part[vision.prefix_tokens :] for part in parts])
