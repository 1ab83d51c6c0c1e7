"""Writing the trained model as a Hugging Face checkpoint of type `qwen3_vl`."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from .shape import (
    LEAST_CLIP_PIXELS,
    LEAST_PIXELS,
    MAX_LENGTH,
    MERGE,
    MOST_CLIP_PIXELS,
    MOST_PIXELS,
    PATCH,
    TEMPORAL,
    hf_config,
)
from .tokenizer import CHAT_TEMPLATE, END, IMAGE, PAD, VIDEO, VISION_END, VISION_START, special_ids

BICUBIC = 3
PIXELS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": MERGE,
    "patch_size": PATCH,
    "processor_class": "Qwen3VLProcessor",
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "temporal_patch_size": TEMPORAL,
}


def processor_configs() -> dict[str, dict[str, Any]]:
    """File name -> contents, for pictures and for clips."""
    return {
        "preprocessor_config.json": PIXELS
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
        },
        "video_preprocessor_config.json": PIXELS
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": LEAST_CLIP_PIXELS, "longest_edge": MOST_CLIP_PIXELS},
            "fps": 2,
            "min_frames": 4,
            "max_frames": 32,
        },
    }


def export(weights: dict[str, Tensor], tokenizer: Tokenizer, directory: Path) -> None:
    """Replaces `directory`: the model in bfloat16 as transformers writes it, tokenizer, settings of the processors."""
    ids = special_ids(tokenizer)
    model = Qwen3VLForConditionalGeneration._from_config(
        hf_config(tokenizer.get_vocab_size(), ids), dtype=torch.bfloat16
    )
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})
    model.generation_config.update(bos_token_id=None, eos_token_id=ids["end"], pad_token_id=ids["pad"], do_sample=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "eos_token": END,
        "pad_token": PAD,
        "image_token": IMAGE,
        "video_token": VIDEO,
        "vision_bos_token": VISION_START,
        "vision_eos_token": VISION_END,
        "clean_up_tokenization_spaces": False,
    }
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch)
        model.save_pretrained(written)
        tokenizer.save(str(written / "tokenizer.json"))
        (written / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        for name, values in {"tokenizer_config.json": settings, **processor_configs()}.items():
            (written / name).write_text(json.dumps(values, indent=2) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file in sorted(written.iterdir()):
            shutil.copyfile(file, directory / file.name)
