"""Tiny models with an encoder of images: a checkpoint of transformers, and the same as two GGUF files.

Tensors of the encoder have the names that the package `gguf` maps them to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.support.gguf_files import CONFIG, CONFIGS, _add_metadata, _in_file, _randomize, _written, vocabulary
from tests.support.gguf_hybrids import HYBRIDS, add_metadata, tensors_in_file

IMAGE, START, END = 300, 301, 302
MEAN, STD = [0.4, 0.5, 0.6], [0.25, 0.5, 0.5]
SIGLIP = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": 4,
    "layer_norm_eps": 1e-3,
}


@dataclass(frozen=True)
class VisionFile:
    """How llama.cpp's converter writes one kind of model."""

    architecture: str
    projector: str
    config: Callable[[], Any]
    tokens: dict[int, str]
    template: str
    """What the chat template writes for an image."""
    add_encoder: Callable[[gguf.GGUFWriter, Any], None]
    encoder_tensors: Callable[[str, np.ndarray], Iterator[tuple[str, np.ndarray]]]
    """The file's tensors of one of transformers' model; names that `gguf` maps, or names in the file."""
    pixels: dict[str, Any] = field(default_factory=dict)
    """What the published image processor's file has that is not a default of transformers."""


def _gemma3() -> Any:
    return transformers.Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(),
        vision_config=SIGLIP | {"image_size": 24, "vision_use_head": False},
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )


def _add_gemma3(writer: gguf.GGUFWriter, _: Any) -> None:
    writer.add_vision_image_size(24)
    writer.add_vision_projector_scale_factor(2)


def _gemma3_tensors(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.", 1)
    yield name.replace("_weight", ".weight"), values + 1 if "soft_emb_norm" in name else values


def _lfm2() -> Any:
    return transformers.Lfm2VlConfig(
        text_config=HYBRIDS["lfm2"][1]().to_dict(),
        vision_config=SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 36},
        image_token_id=IMAGE,
        projector_hidden_size=100,
        tie_word_embeddings=True,
    )


def _add_lfm2(writer: gguf.GGUFWriter, _: Any) -> None:
    writer.add_vision_image_size(256)
    writer.add_vision_projector_scale_factor(2)


def _lfm2_tensors(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if ".head." in name:
        return
    if name.endswith("patch_embedding.weight"):
        values = values.reshape(-1, 4, 4, 3).transpose(0, 3, 1, 2)
    yield name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.", 1), values


QWEN_VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 49,
}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
LFM2_TEXTS = {START: "<|image_start|>", END: "<|image_end|>", 304: "<|img_thumbnail|>"}
ROPE = {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [6, 6, 4], "mrope_interleaved": True}
OF_QWEN = {"image_token_id": IMAGE, "video_token_id": 303, "vision_start_token_id": START, "vision_end_token_id": END}
QWEN_TEXTS = {IMAGE: "<|image_pad|>", 303: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}


def _qwen3_vl() -> Any:
    text = CONFIG | {"head_dim": 32, "rope_parameters": ROPE, "num_hidden_layers": 3}
    vision = QWEN_VISION | {"deepstack_visual_indexes": [0, 2]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **OF_QWEN, tie_word_embeddings=True)


def _qwen3_vl_moe() -> Any:
    text = CONFIG | {"head_dim": 32, "rope_parameters": ROPE, "num_experts": 4, "num_experts_per_tok": 2}
    text |= {"moe_intermediate_size": 64}
    vision = QWEN_VISION | {"deepstack_visual_indexes": [1]}
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **OF_QWEN, tie_word_embeddings=False)


def _qwen3_5(kind: str) -> Any:
    text = HYBRIDS[kind][1]().to_dict()
    whole = transformers.Qwen3_5Config if kind == "qwen35" else transformers.Qwen3_5MoeConfig
    return whole(
        text_config=text, vision_config=QWEN_VISION, **OF_QWEN, tie_word_embeddings=text["tie_word_embeddings"]
    )


def _add_qwen(writer: gguf.GGUFWriter, config: Any) -> None:
    vision = config.vision_config
    stacked = getattr(vision, "deepstack_visual_indexes", None) or []
    writer.add_vision_image_size(28)
    writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
    writer.add_vision_is_deepstack_layers([i in stacked for i in range(vision.depth)])


def _qwen_tensors(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    name = name.removeprefix("model.")
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    elif name.startswith("visual.merger."):
        for inner, in_file in (("norm", "v.post_ln"), ("linear_fc1", "mm.0"), ("linear_fc2", "mm.2")):
            name = name.replace(f"visual.merger.{inner}", in_file)
        yield name, values
    else:
        yield name, values


def _qwen_stack(layers: list[int]) -> Callable[[str, np.ndarray], Iterator[tuple[str, np.ndarray]]]:
    def tensors(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        found = re.fullmatch(r"model\.visual\.deepstack_merger_list\.(\d)\.(?:linear_)?(.+)", name)
        if found is None:
            yield from _qwen_tensors(name, values)
        else:
            yield f"v.deepstack.{layers[int(found[1])]}.{found[2]}", values

    return tensors


QWEN_PIXELS = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
VISION_FILES = {
    "lfm2": VisionFile("lfm2", "lfm2", _lfm2, {IMAGE: "<image>"} | LFM2_TEXTS, "<image>", _add_lfm2, _lfm2_tensors),
    "qwen3vl": VisionFile(
        "qwen3vl", "qwen3vl_merger", _qwen3_vl, QWEN_TEXTS, QWEN_IMAGE, _add_qwen, _qwen_stack([0, 2]), QWEN_PIXELS
    ),
    "qwen3vlmoe": VisionFile(
        "qwen3vlmoe", "qwen3vl_merger", _qwen3_vl_moe, QWEN_TEXTS, QWEN_IMAGE, _add_qwen, _qwen_stack([1]), QWEN_PIXELS
    ),
    **{
        kind: VisionFile(
            kind.partition(" ")[0],
            "qwen3vl_merger",
            partial(_qwen3_5, kind),
            QWEN_TEXTS,
            QWEN_IMAGE,
            _add_qwen,
            _qwen_tensors,
            QWEN_PIXELS,
        )
        for kind in ("qwen35", "qwen35moe of experts")
    },
    "gemma3": VisionFile(
        "gemma3",
        "gemma3",
        _gemma3,
        {IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"},
        "<start_of_image>",
        _add_gemma3,
        _gemma3_tensors,
    ),
}


def write_checkpoint(folder: Path, name: str) -> Path:
    """The checkpoint that transformers saves, and the files of its processor."""
    row, checkpoint = VISION_FILES[name], folder / "checkpoint"
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(row.config(), dtype=torch.float32)
    _randomize(model)
    model.save_pretrained(checkpoint)
    pixels = {"image_mean": MEAN, "image_std": STD}
    for part, own in (("", row.pixels), ("video_", {})):
        (checkpoint / f"{part}preprocessor_config.json").write_text(json.dumps(pixels | own))
    torch.save(model.state_dict(), folder / "weights.pt")
    return checkpoint


def write_text(folder: Path, name: str) -> Path:
    """The file of the text part."""
    row, config, path = VISION_FILES[name], VISION_FILES[name].config(), folder / "text.gguf"
    text, writer = config.text_config, gguf.GGUFWriter(str(path), row.architecture)
    in_file = _add_text(writer, name, text)
    if name.startswith("qwen3vl"):
        writer.add_rope_dimension_sections([6, 6, 4, 0])
        writer.add_num_deepstack_layers(len(config.vision_config.deepstack_visual_indexes))
    tokens, types, merges = vocabulary()
    tokens += [f"[PAD{i}]" for i in range(text.vocab_size - len(tokens))]
    types += [5] * (text.vocab_size - len(types))
    for number, content in row.tokens.items():
        tokens[number], types[number] = content, 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    image = f"{{% if part.type == 'image' %}}{row.template}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    each = f"{{% for part in m.content %}}{image}{{% endfor %}}"
    writer.add_chat_template(f"{{% for m in messages %}}{each}{{% endfor %}}")
    for called, tensor in torch.load(folder / "weights.pt").items():
        if called.startswith(("model.language_model.", "lm_head.")):
            for stored, values in in_file(called.replace("language_model.", ""), tensor.numpy()):
                writer.add_tensor(stored, np.ascontiguousarray(values))
    return _written(writer, path)


def _add_text(writer: gguf.GGUFWriter, name: str, text: Any) -> Callable[[str, np.ndarray], Any]:
    """Add the metadata; return what names the tensors."""
    if name in HYBRIDS:
        add_metadata(writer, name, text)
        return partial(tensors_in_file, text)
    if name == "qwen3vlmoe":
        text = SimpleNamespace(**text.to_dict() | {"model_type": "qwen3_moe", "num_experts": 4})
        add_metadata(writer, "qwen3vlmoe of experts", text)
        return partial(tensors_in_file, text)
    _add_metadata(writer, "qwen3" if name == "qwen3vl" else name, text)
    return partial(_in_file, text)


def write_encoder(
    path: Path, name: str, kind: str = "F32", rename: Callable[[str], str | None] = str, **metadata: Any
) -> Path:
    """The file of the encoder, its matrices in `kind`, its tensors renamed; `metadata` replaces values.

    A name or a value that is None is left out. The weights are those beside the file.
    """
    row, config = VISION_FILES[name], VISION_FILES[name].config()
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(row.projector)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_mean(MEAN)
    writer.add_vision_image_std(STD)
    writer.add_vision_use_gelu(True)
    vision = config.vision_config.to_dict()
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision.get("num_hidden_layers") or vision["depth"])
    writer.add_vision_head_count(vision.get("num_attention_heads") or vision["num_heads"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_attention_layernorm_eps(vision.get("layer_norm_eps", 1e-6))
    row.add_encoder(writer, config)
    for key, value in metadata.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 9)
    for called, tensor in torch.load(path.parent / "weights.pt").items():
        if called.startswith(("model.language_model.", "lm_head.")):
            continue
        for stored, values in row.encoder_tensors(called, tensor.numpy()):
            stored = rename(names.get_name(stored, (".weight", ".bias")) or stored)
            if stored is None:
                continue
            if kind != "F32" and values.ndim == 2 and values.shape[1] % 32 == 0:
                number = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(stored, gguf.quantize(values, number), raw_dtype=number)
            else:
                writer.add_tensor(stored, np.ascontiguousarray(values))
    return _written(writer, path)
