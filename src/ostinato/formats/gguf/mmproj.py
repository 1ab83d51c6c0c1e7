"""Encoders of images of GGUF models, each in a file of its own beside the text's (llama.cpp's `mmproj`). No torch.

Names and metadata are those of gguf-py (architecture `clip`). The files do not say which tokens stand for an image:
these are found by their texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ostinato.errors import ModelError
from ostinato.files import is_file
from ostinato.formats.gguf.metadata import Metadata
from ostinato.formats.gguf.reader import Header, LazyStrings, read_header
from ostinato.formats.gguf.tensor_names import OF_ENCODER
from ostinato.json_io import JsonObject

PATTERN = "*mmproj*.gguf"
"""Names of such files."""


@dataclass(frozen=True)
class Projector:
    """One kind of encoder and of the projector behind it."""

    kind: str
    """llama.cpp's `clip.projector_type`."""
    model_type: str
    """`model_type` of the whole model."""
    tokens: dict[str, str]
    """Names in config.json of the ids of special tokens, and these tokens' texts; the first one is an image's."""
    config: Callable[[Metadata, Metadata], JsonObject]
    """Function from the metadata of the encoder and of the text to the config.json, without its text part."""
    pixels: JsonObject = field(default_factory=dict)
    """Settings of the image processor's file that are not its defaults, besides those of the encoder's file."""


def _siglip(clip: Metadata) -> JsonObject:
    return {
        "hidden_size": clip.integer("vision.embedding_length"),
        "intermediate_size": clip.integer("vision.feed_forward_length"),
        "num_hidden_layers": clip.integer("vision.block_count"),
        "num_attention_heads": clip.integer("vision.attention.head_count"),
        "patch_size": clip.integer("vision.patch_size"),
        "layer_norm_eps": clip.number("vision.attention.layer_norm_epsilon"),
    }


def _gemma3(clip: Metadata, _: Metadata) -> JsonObject:
    vision = _siglip(clip) | {"image_size": clip.integer("vision.image_size")}
    side = max(clip.integer("vision.projector.scale_factor", 4) * vision["patch_size"], 1)
    return {"vision_config": vision, "mm_tokens_per_image": (vision["image_size"] // side) ** 2}


def _lfm2(clip: Metadata, _: Metadata) -> JsonObject:
    tensors = clip.header.tensors
    return {
        "vision_config": _siglip(clip) | {"num_patches": _rows(clip, "v.position_embd.weight")},
        "downsample_factor": clip.integer("vision.projector.scale_factor", 2),
        "projector_hidden_size": _rows(clip, "mm.1.weight"),
        "projector_bias": "mm.1.bias" in tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in tensors,
    }


def _qwen3_vl(clip: Metadata, text: Metadata) -> JsonObject:
    """Return the settings of Qwen's encoder, whose layer norms have a fixed epsilon whatever the file says."""
    vision = _siglip(clip)
    stacked = clip.optional("vision.is_deepstack_layers")
    layers = [] if stacked is None else [i for i, is_stacked in enumerate(stacked) if is_stacked]
    return {
        "vision_config": {
            "hidden_size": vision["hidden_size"],
            "intermediate_size": vision["intermediate_size"],
            "depth": vision["num_hidden_layers"],
            "num_heads": vision["num_attention_heads"],
            "patch_size": vision["patch_size"],
            "temporal_patch_size": 1 + ("v.patch_embd.weight.1" in clip.header.tensors),
            "spatial_merge_size": clip.integer("vision.spatial_merge_size", 2),
            "out_hidden_size": text.integer("embedding_length"),
            "num_position_embeddings": _rows(clip, "v.position_embd.weight"),
            "deepstack_visual_indexes": layers,
        }
    }


def _rows(clip: Metadata, name: str) -> int:
    tensor = clip.header.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(f"{clip.header.path} has no matrix {name}")
    return tensor.shape[0]


_OF_QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_PIXELS = {"size": {"shortest_edge": 2**16, "longest_edge": 2**24}}
"""Limits of an image in the processor's files of Qwen3-VL and Qwen3.5; GGUF files have none."""

PROJECTORS = {
    "gemma3": Projector(
        "gemma3",
        "gemma3",
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        _gemma3,
    ),
    "lfm2": Projector("lfm2", "lfm2_vl", {"image_token_id": "<image>"}, _lfm2),
    **{
        architecture: Projector("qwen3vl_merger", model_type, _OF_QWEN, _qwen3_vl, _QWEN_PIXELS)
        for architecture, model_type in (
            ("qwen3vl", "qwen3_vl"),
            ("qwen3vlmoe", "qwen3_vl_moe"),
            ("qwen35", "qwen3_5"),
            ("qwen35moe", "qwen3_5_moe"),
        )
    },
}
"""Encoders by llama.cpp's architecture of the text."""


def with_encoder(header: Header, candidates: Sequence[Path]) -> Header:
    """Return the header of a model's text with the encoder from one of the files beside it, the largest that fits.

    Where none does, `no_images` has the reason, unless no file is there and the text knows no images. ModelError if
    none fits and one is damaged.
    """
    projector = PROJECTORS.get(str(header.metadata.get("general.architecture")))
    if projector is None:
        return _unread(header, candidates, f"encoders of images are read beside texts of {', '.join(PROJECTORS)}")
    tokens, image = header.metadata.get("tokenizer.ggml.tokens"), next(iter(projector.tokens.values()))
    if not isinstance(tokens, LazyStrings) or tokens.find(image) is None:
        return _unread(header, candidates, f"the text has no token {image}, which stands for an image")
    fitting: list[Header] = []
    damaged: list[ModelError] = []
    foreign: list[str] = []
    for path in candidates:
        if not is_file(path):  # to open a pipe would wait for its writer
            foreign.append(f"{path.name} is no file")
            continue
        try:
            found = read_header(path)
        except ModelError as error:
            damaged.append(error)
            continue
        reason = _mismatch(found, projector, Metadata(header))
        if reason is None:
            fitting.append(found)
        else:
            foreign.append(f"{path.name} {reason}")
    if fitting:
        chosen = max(fitting, key=lambda found: sum(tensor.num_bytes for tensor in found.tensors.values()))
        clip = _as_named_today(chosen)
        return replace(header, tensors=header.tensors | clip.tensors, mmproj=clip)
    if damaged:
        raise damaged[0]
    reason = "; ".join(foreign) or f"no file {PATTERN} is beside it"
    return replace(header, no_images=f"images are refused: {reason}")


def _unread(header: Header, candidates: Sequence[Path], reason: str) -> Header:
    names = ", ".join(path.name for path in candidates)
    return replace(header, no_images=f"{names} is not read: {reason}") if names else header


def _mismatch(found: Header, projector: Projector, text: Metadata) -> str | None:
    """Return why a file is no encoder of the model; None if it is one."""
    values = {name: value for name, value in found.metadata.items() if isinstance(value, str | int)}  # no arrays
    if values.get("general.architecture") != "clip" or values.get("clip.has_vision_encoder") is not True:
        return f"is no encoder of images (architecture {values.get('general.architecture')!r})"
    kind = values.get("clip.projector_type", values.get("clip.vision.projector_type"))
    if kind != projector.kind:
        return f"is of another model: its projector_type is {kind!r}, and should be {projector.kind!r}"
    size = values.get("clip.vision.projection_dim")
    of_text = text.integer("embedding_length")
    if size != of_text:
        return f"is of another model: its projection_dim is {size!r}, and the text's embedding_length {of_text!r}"
    if values.get("clip.use_gelu") is not True:
        return f"has clip.use_gelu = {values.get('clip.use_gelu')!r}; supported: True"
    others = [name for name in found.tensors if not name.startswith(OF_ENCODER)]
    return f"has tensors that belong to no encoder of images: {', '.join(others[:3])}" if others else None


def _as_named_today(header: Header) -> Header:
    """Return the header with `ffn_up` as the first matrix of an MLP; older files have the two names the other way."""
    first, size = header.tensors.get("v.blk.0.ffn_up.weight"), header.metadata.get("clip.vision.embedding_length")
    if first is None or len(first.shape) != 2 or first.shape[1] == size or first.shape[0] != size:
        return header
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    tensors = {}
    for name, tensor in header.tensors.items():
        parts = ".".join(other.get(part, part) for part in name.split("."))
        tensors[parts] = replace(tensor, name=parts)
    return replace(header, tensors=tensors)


def with_images(text: JsonObject, header: Header) -> JsonObject:
    """Return the config.json of the whole model, whose text part is `text`. ModelError for a token without a text."""
    if header.mmproj is None:
        return text
    of_text, clip = Metadata(header), Metadata(header.mmproj)
    projector, tokens = PROJECTORS[of_text.architecture], header.metadata["tokenizer.ggml.tokens"]
    ids = {name: tokens.find(content) for name, content in projector.tokens.items()}
    absent = [projector.tokens[name] for name, number in ids.items() if number is None]
    if absent:
        raise ModelError(
            f"{header.path} has no token {', '.join(absent)}, which images need; remove {clip.header.path}"
        )
    if projector.tokens is _OF_QWEN:
        sections = [int(size) for size in of_text.required("rope.dimension_sections")[:3]]
        text = text | {"rope_scaling": (text["rope_scaling"] or {}) | {"mrope_section": sections}}
    whole = {"model_type": projector.model_type, "text_config": text, **ids, **projector.config(clip, of_text)}
    return whole | {"dtype": text["dtype"], "tie_word_embeddings": text["tie_word_embeddings"]}


def processor_of(header: Header) -> JsonObject:
    """Return the preprocessor_config.json: what the file says of pixels; the rest are the processor's defaults."""
    settings = video_processor_of(header)
    return settings and settings | PROJECTORS[header.metadata["general.architecture"]].pixels


def video_processor_of(header: Header) -> JsonObject:
    """Return the video_preprocessor_config.json, as `processor_of`."""
    if header.mmproj is None:
        return {}
    clip = Metadata(header.mmproj)
    return {f"image_{name}": clip.numbers(f"vision.image_{name}") for name in ("mean", "std")}
