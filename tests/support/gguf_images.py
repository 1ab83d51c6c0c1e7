"""Tiny models with an encoder of images: a checkpoint of transformers, and the same as two GGUF files.

Tensors of the encoder have the names that the package `gguf` maps them to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.support.gguf_files import CONFIG, CONFIGS, _add_metadata, _in_file, _randomize, _written, vocabulary

IMAGE, START, END = 300, 301, 302
MEAN, STD = [0.4, 0.5, 0.6], [0.25, 0.5, 0.5]
SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 70,
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


VISION_FILES = {
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
    (checkpoint / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    torch.save(model.state_dict(), folder / "weights.pt")
    return checkpoint


def write_text(folder: Path, name: str) -> Path:
    """The file of the text part."""
    row, config, path = VISION_FILES[name], VISION_FILES[name].config(), folder / "text.gguf"
    text, writer = config.text_config, gguf.GGUFWriter(str(path), row.architecture)
    _add_metadata(writer, row.architecture, text)
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
            for stored, values in _in_file(text, called.replace("language_model.", ""), tensor.numpy()):
                writer.add_tensor(stored, np.ascontiguousarray(values))
    return _written(writer, path)


def write_encoder(path: Path, name: str, kind: str = "F32", **metadata: Any) -> Path:
    """The file of the encoder, its matrices in `kind`; `metadata` replaces values, None leaves one out."""
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
            stored = names.get_name(stored, (".weight", ".bias")) or stored
            if kind != "F32" and values.ndim == 2 and values.shape[1] % 32 == 0:
                number = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(stored, gguf.quantize(values, number), raw_dtype=number)
            else:
                writer.add_tensor(stored, np.ascontiguousarray(values))
    return _written(writer, path)
