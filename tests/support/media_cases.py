"""Images, settings and a tokenizer for tests of media, from plain numbers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tokenizers
from PIL import Image

from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.media.processor_config import MediaSettings, PixelSettings, SliceSettings, TileSettings
from ostinato.plan.layer_specs import CanvasTokens, VisionSpec

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
HALVES = (0.5, 0.5, 0.5)

# As published Qwen3-VL checkpoints write it.
TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
<|im_start|>system
{% for part in message.content if 'text' in part %}{{ part.text }}{% endfor %}<|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ show(message.content) }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def vision_spec(**changes: Any) -> VisionSpec:
    """A small encoder with Qwen3-VL's patches, for the ids of `tokenizer`."""
    own = tokenizer()
    ids = [own.token_id(text) for text in (IMAGE, VIDEO, START, END)]
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "in_channels": 3,
        "out_hidden_size": 48,
        "num_positions": 64,
        "deepstack_layers": (0,),
        "image_token_id": ids[0],
        "video_token_id": ids[1],
        "start_token_id": ids[2],
        "end_token_id": ids[3],
    }
    return VisionSpec(**(fields | changes))


def tokenizer() -> Tokenizer:
    """Bytes, and the special tokens of a conversation with images."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=_bytes(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", START, END, IMAGE, VIDEO])
    return Tokenizer(backend)


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def pixel_settings(kind: Literal["image", "video"] = "image", **changes: Any) -> PixelSettings:
    """As Qwen3-VL's, but for smaller limits."""
    fields: dict[str, Any] = {
        "min_pixels": 4096,
        "max_pixels": 65536,
        "resample": 3,
        "scale": 1 / 255,
        "mean": HALVES,
        "std": HALVES,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    return PixelSettings(kind, **(fields | changes))


def tiled_settings(**changes: Any) -> PixelSettings:
    """As published LFM2-VL's, whose large images are cut into tiles."""
    own: dict[str, Any] = {"min_pixels": 64 * 32**2, "max_pixels": 256 * 32**2, "resample": 2, "is_naflex": True}
    tiles = TileSettings(size=512, min_tiles=2, max_tiles=10, has_thumbnail=True, tolerance=2.0)
    return pixel_settings(**(own | {"temporal_patch_size": 1, "tiles": tiles} | changes))


FITTED = {
    "merge_size": 3,
    "temporal_patch_size": 1,
    "num_positions": 20480,
    "positions_by_axis": True,
    "video_token_id": None,
}
"""What an encoder like Gemma 4's has beside `vision_spec`."""


def fitted_settings(tokens: int) -> PixelSettings:
    """As published Gemma 4's, whose images have as many tokens as fit."""
    limits = {"min_pixels": 48**2, "max_pixels": tokens * 48**2, "max_side": 163840}
    return pixel_settings(**limits, merge_size=3, temporal_patch_size=1, is_naflex=True)


FLOATS = {"temporal_patch_size": 1, "num_positions": 16384, "crops_positions": True, "video_token_id": None}
"""What an encoder like Nemotron 3 Nano Omni's has beside `vision_spec`."""


def float_settings(least: int = 1024, most: int = 13312) -> PixelSettings:
    """As published Nemotron 3 Nano Omni's, for images of so many patches."""
    clip = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
    limits = {"min_pixels": 256 * least, "max_pixels": 256 * most, "most_pixels": 256 * most}
    return pixel_settings(**limits, **clip, temporal_patch_size=1, in_floats=True)


SLICED = {
    "patch_size": 14,
    "merge_size": 4,
    "temporal_patch_size": 1,
    "video_token_id": None,
    "has_windows": True,
    "canvas": CanvasTokens(1, 2, 3, 4, 5),
}
"""What an encoder like MiniCPM-V 4.7's has beside `vision_spec`."""


def sliced_settings(merge_size: int = 4, **changes: Any) -> PixelSettings:
    """As published MiniCPM-V 4.7's, but for images of 224 pixels."""
    own: dict[str, Any] = {"min_pixels": 224**2, "max_pixels": 224**2, "slices": SliceSettings(9, True)}
    own |= {"patch_size": 14, "temporal_patch_size": 1, "merge_size": merge_size, "has_windows": merge_size == 4}
    return pixel_settings(**(own | changes))


def media_settings() -> MediaSettings:
    return MediaSettings(pixel_settings(), pixel_settings("video"))


def drawn(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image of noise over a gradient."""
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 3))
    gradient = np.linspace(0, 127, width)[None, :, None] * np.ones((height, 1, 3))
    return Image.fromarray((noise + gradient).astype(np.uint8))


def _bytes() -> dict[str, int]:
    return {text: i for i, text in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
