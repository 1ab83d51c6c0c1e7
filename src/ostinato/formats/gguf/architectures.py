"""Architectures in GGUF files: the config.json of a file, and the checkpoint's names of its tensors. Imports no torch.

Also runs of tensors that can be read in place. A matmul may need several tensors as one matrix, such as gates and what
they gate. They are one matrix if they are adjacent in the file, as most writers put these two. Tensors whose rows a
checkpoint has in another order, such as queries and keys of Llama, are copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ostinato.errors import ModelError
from ostinato.formats.gguf import tensor_names
from ostinato.formats.gguf.hybrid_configs import (
    falcon_h1,
    granite_hybrid,
    jamba,
    kimi_linear,
    lfm2,
    lfm2_moe,
    mamba,
    mamba2,
    nemotron_h,
    qwen3_next,
    qwen35,
    qwen35_moe,
)
from ostinato.formats.gguf.metadata import Metadata
from ostinato.formats.gguf.model_configs import (
    MLP_BIASES,
    attention,
    cohere2,
    ernie,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    granite,
    granite_swa,
    ministral3,
    mixtral_experts,
    olmo3,
    phi3,
    qwen3_moe,
    youtu,
)
from ostinato.formats.gguf.reader import GgufTensor, Header
from ostinato.formats.gguf.tensor_names import BARE, EACH, GATE, IN_HEAD, KEYS, OF_ENCODER, UP, VALUES, is_changed
from ostinato.json_io import JsonObject
from ostinato.ops.quant.block_formats import BLOCK_FORMATS

if TYPE_CHECKING:
    from ostinato.plan.model import ModelSpec


def config_of(header: Header) -> JsonObject:
    """Return the config.json that transformers would write.

    Raises ModelError for another architecture, for what is missing, and for what such a model cannot be run with.
    """
    metadata = Metadata(header)
    architecture = metadata.architecture
    if architecture not in _CONFIGS:
        known = ", ".join(_CONFIGS)
        advice = ". It is an encoder of images: give the file of the text beside it" if architecture == "clip" else ""
        raise ModelError(
            f"{header.path} has a model of architecture {architecture!r}; GGUF files are read of {known}{advice}"
        )
    if metadata.num_head_layers and architecture not in _WITH_HEADS:
        raise ModelError(
            f"{header.path} has a prediction head (nextn_predict_layers); GGUF files are read with one of "
            f"{', '.join(_WITH_HEADS)}; convert the model without it"
        )
    config = _shared(metadata) | _CONFIGS[architecture](metadata)
    window = metadata.optional("attention.sliding_window")
    if window and window < metadata.integer("context_length") and "sliding_window" not in config:
        raise ModelError(
            f"{header.path} has attention.sliding_window = {window}; supported for {architecture}: attention over "
            f"the whole context of {metadata.integer('context_length')} tokens"
        )
    return config


def _shared(metadata: Metadata) -> JsonObject:
    """Return the settings that every model has under the same keys."""
    header = metadata.header
    embedding = header.tensors.get("token_embd.weight")
    tokens = len(header.metadata.get("tokenizer.ggml.tokens", ()))
    if embedding is None or len(embedding.shape) != 2:
        vocab_size = tokens or metadata.integer("vocab_size")
    else:
        vocab_size = embedding.shape[0]
    if tokens > vocab_size:
        raise ModelError(f"{header.path} has {tokens} tokens, and an embedding of {vocab_size}")
    return {
        "dtype": _dtype(header),
        "vocab_size": vocab_size,
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.num_layers,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.norm_eps,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _llama(metadata: Metadata) -> JsonObject:
    """Return the config of Llama or a model like it; with experts, `llama` is Mixtral."""
    config = {
        "model_type": metadata.architecture,
        **attention(metadata),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "mlp_bias": metadata.has(*MLP_BIASES),
    }
    if not metadata.optional("expert_count"):
        return config
    if metadata.architecture != "llama":
        raise ModelError(
            f"{metadata.header.path} has a {metadata.architecture} model of experts; GGUF files are read of models "
            "without"
        )
    return config | mixtral_experts(metadata)


def _qwen3_vl(metadata: Metadata) -> JsonObject:
    """Return the config of Qwen3-VL's text part, which without images is Qwen3."""
    return _llama(metadata) | {"model_type": "qwen3"}


@dataclass(frozen=True)
class GgufArchitecture:
    """Form of one architecture's models in GGUF files."""

    configs: Mapping[str, Callable[[Metadata], JsonObject]]
    """llama.cpp's names of the architecture, and the function that makes the rest of the config.json from each."""
    layer: Mapping[str, str]
    """Checkpoint's names in a layer, by the file's."""
    whole_names: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint's names in a layer of tensors whose names have no suffix there, by the file's names with theirs."""
    outer: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint's names in the backbone of tensors outside the layers that only this architecture has."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint's names of the encoder's tensors, by those of its file."""
    backbone: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    """Final norm."""
    embedding_norm: str | None = None
    """Name of `token_embd_norm`, which follows the layers, in spite of its name."""
    mixer: str = "mixer"
    """Module of the tensors in `tensor_names.BARE`."""
    expert_bias: str | None = None
    """Name of the bias that is added to experts' scores for their selection."""
    needs_biases: bool = False
    """True if no bias may be absent from its files. Elsewhere one that is absent is zero."""
    has_head: bool = False
    """True if its files may have a prediction head."""
    norms_less_one: bool = False
    """True if checkpoints store a norm's weight w as w - 1, and files as w."""
    adjacent_rope: bool = False
    """True if, in each head of a file, two rows of queries or keys that positions rotate together are neighbours.

    In the model they are half a head apart, as in most checkpoints. Some writers do the same to Nemotron-H. It has no
    positions, so its scores are the same in any order.
    """
    rotates_last: bool = False
    """True if these are only the last rows of each head, as with latent attention."""


_DELTA_NETS: JsonObject = {"mixer": "linear_attn", "has_head": True, "norms_less_one": True}

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture({"llama": _llama}, tensor_names.LLAMA, adjacent_rope=True),
    "mixtral": GgufArchitecture({"llama": _llama}, tensor_names.MIXTRAL, adjacent_rope=True),
    "qwen2": GgufArchitecture({"qwen2": _llama}, tensor_names.LLAMA, needs_biases=True),
    "qwen3": GgufArchitecture({"qwen3": _llama, "qwen3vl": _qwen3_vl}, tensor_names.LLAMA),
    "smollm3": GgufArchitecture({"smollm3": _llama}, tensor_names.LLAMA, adjacent_rope=True),
    "arcee": GgufArchitecture({"arcee": _llama}, tensor_names.LLAMA, adjacent_rope=True),
    "ernie4_5": GgufArchitecture({"ernie4_5": ernie}, tensor_names.LLAMA, adjacent_rope=True),
    "seed_oss": GgufArchitecture({"seed_oss": _llama}, tensor_names.SEED_OSS),
    "cohere2": GgufArchitecture({"cohere2": cohere2}, tensor_names.LLAMA, adjacent_rope=True),
    "ministral3": GgufArchitecture({"mistral3": ministral3}, tensor_names.LLAMA, adjacent_rope=True),
    "phi3": GgufArchitecture({"phi3": phi3}, tensor_names.PHI3),
    "exaone4": GgufArchitecture({"exaone4": exaone4}, tensor_names.OLMO),
    "olmo3": GgufArchitecture({"olmo2": olmo3}, tensor_names.OLMO),
    "qwen3_moe": GgufArchitecture({"qwen3moe": qwen3_moe, "qwen3vlmoe": qwen3_moe}, tensor_names.QWEN3_MOE),
    "gemma2": GgufArchitecture({"gemma2": gemma2}, tensor_names.GEMMA3, norms_less_one=True),
    "gemma3_text": GgufArchitecture({"gemma3": gemma3}, tensor_names.GEMMA3, norms_less_one=True),
    "gemma4_text": GgufArchitecture(
        {"gemma4": gemma4}, tensor_names.GEMMA4, tensor_names.GEMMA4_WHOLE, outer=tensor_names.GEMMA4_OUTER
    ),
    "granitemoehybrid": GgufArchitecture(
        {"granite": granite, "granitemoe": granite, "granitehybrid": granite_hybrid},
        tensor_names.GRANITE,
        mixer="mamba",
        adjacent_rope=True,
    ),
    "granite_swa": GgufArchitecture(
        {"granite_swa": granite_swa}, tensor_names.LLAMA, tensor_names.SINKS, adjacent_rope=True
    ),
    "granitemoe_swa": GgufArchitecture(
        {"granite_swa": granite_swa}, tensor_names.GRANITE_SWA, tensor_names.GRANITE_SWA_WHOLE, adjacent_rope=True
    ),
    "bamba": GgufArchitecture(
        {"granitehybrid": granite_hybrid},
        tensor_names.FALCON,
        norm="final_layernorm",
        mixer="mamba",
        adjacent_rope=True,
    ),
    "falcon_h1": GgufArchitecture({"falcon-h1": falcon_h1}, tensor_names.FALCON, norm="final_layernorm", mixer="mamba"),
    "nemotron_h": GgufArchitecture(
        {"nemotron_h": nemotron_h, "nemotron_h_moe": nemotron_h},
        tensor_names.NEMOTRON,
        embedding="embeddings",
        norm="norm_f",
        expert_bias="mixer.gate.e_score_correction_bias",
    ),
    "mamba2": GgufArchitecture(
        {"mamba2": mamba2}, tensor_names.MAMBA2, backbone="backbone", embedding="embeddings", norm="norm_f"
    ),
    "falcon_mamba": GgufArchitecture(
        {"mamba": mamba},
        tensor_names.MAMBA,
        {"ssm_dt.bias": "mixer.dt_proj.bias"},
        backbone="backbone",
        embedding="embeddings",
        norm="norm_f",
    ),
    "jamba": GgufArchitecture(
        {"jamba": jamba},
        tensor_names.JAMBA,
        {"ssm_dt.bias": "mamba.dt_proj.bias"},
        norm="final_layernorm",
        mixer="mamba",
    ),
    "kimi_linear": GgufArchitecture(
        {"kimi-linear": kimi_linear},
        tensor_names.KIMI_LINEAR,
        mixer="self_attn",
        expert_bias="block_sparse_moe.gate.e_score_correction_bias",
    ),
    "lfm2": GgufArchitecture({"lfm2": lfm2}, tensor_names.LFM2, embedding_norm="embedding_norm"),
    "lfm2_moe": GgufArchitecture(
        {"lfm2moe": lfm2_moe},
        tensor_names.LFM2_MOE,
        embedding_norm="embedding_norm",
        expert_bias="feed_forward.expert_bias",
    ),
    "qwen3_5_text": GgufArchitecture({"qwen35": qwen35}, tensor_names.QWEN35, **_DELTA_NETS),
    "qwen3_5_moe_text": GgufArchitecture({"qwen35moe": qwen35_moe}, tensor_names.QWEN35_MOE, **_DELTA_NETS),
    "qwen3_next": GgufArchitecture({"qwen3next": qwen3_next}, tensor_names.QWEN3_NEXT, **_DELTA_NETS),
    "youtu": GgufArchitecture({"deepseek2": youtu}, tensor_names.DEEPSEEK2, adjacent_rope=True, rotates_last=True),
    "gpt_oss": GgufArchitecture(
        {"gpt-oss": gpt_oss}, tensor_names.GPT_OSS, tensor_names.GPT_OSS_WHOLE, needs_biases=True
    ),
}
"""All architectures that are read from GGUF files, by the `model_type` of their models."""

_WITH_LANGUAGE_MODEL: JsonObject = {"configs": {}, "backbone": "model.language_model"}
_QWEN_IMAGES: JsonObject = _WITH_LANGUAGE_MODEL | {"images": tensor_names.QWEN_IMAGES}

ARCHITECTURES |= {
    "mamba": replace(ARCHITECTURES["falcon_mamba"], configs={}),
    "gemma3": replace(ARCHITECTURES["gemma3_text"], configs={}, images=tensor_names.GEMMA3_IMAGES),
    "lfm2_vl": replace(ARCHITECTURES["lfm2"], **_WITH_LANGUAGE_MODEL, images=tensor_names.LFM2_IMAGES),
    "qwen3_vl": replace(ARCHITECTURES["qwen3"], **_QWEN_IMAGES),
    "qwen3_vl_moe": replace(ARCHITECTURES["qwen3_moe"], **_QWEN_IMAGES, whole_names=tensor_names.QWEN3_VL_MOE_WHOLE),
    "qwen3_5": replace(ARCHITECTURES["qwen3_5_text"], **_QWEN_IMAGES),
    "qwen3_5_moe": replace(ARCHITECTURES["qwen3_5_moe_text"], **_QWEN_IMAGES),
}

_CONFIGS = {name: config for row in ARCHITECTURES.values() for name, config in row.configs.items()}
_WITH_HEADS = [name for row in ARCHITECTURES.values() if row.has_head for name in row.configs]


def _dtype(header: Header) -> str:
    """Return the dtype of the weights as stored; bfloat16 if there are blocks or several types."""
    matrices = (
        place
        for place in header.tensors.values()
        if len(place.shape) > 1 and not is_changed(place.name) and not place.name.startswith(OF_ENCODER)
    )
    types = {place.type.name for place in matrices}
    return {"F32": "float32", "F16": "float16"}.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def checkpoint_name(model: ModelSpec, name: str) -> str | None:
    """Return the checkpoint's name of a tensor of a GGUF file; None for an unknown name.

    `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; in a model of three layers and a head it is
    `mtp.layers.0.self_attn.q_proj.weight`.
    """
    row = ARCHITECTURES[model.architecture]
    backbone = row.backbone
    if name.startswith(OF_ENCODER):
        return _in_encoder(row, name, model)
    stem, _, part = name.rpartition(".")
    if stem == "token_embd":
        return f"{backbone}.{row.embedding}.{part}"
    if stem == "output_norm":
        return f"{backbone}.{row.norm}.{part}"
    if stem == "token_embd_norm" and row.embedding_norm is not None:
        return f"{backbone}.{row.embedding_norm}.{part}"
    if stem in row.outer:
        return f"{backbone}.{row.outer[stem]}.{part}"
    if stem == "output":
        return f"lm_head.{part}"
    found = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", name)
    if found is None:
        return None
    number, inner = int(found[1]), found[2]
    if model.head is None or number < model.num_layers:
        return _in_layer(row, f"{backbone}.layers.{number}", inner)
    of_head = IN_HEAD.get(inner.rpartition(".")[0])
    if of_head is not None:
        return f"mtp.{of_head}.{part}"
    return _in_layer(row, f"mtp.layers.{number - model.num_layers}", inner)


def _in_encoder(row: GgufArchitecture, name: str, model: ModelSpec) -> str | None:
    found = re.fullmatch(r"(v\.(?:blk|deepstack))\.(\d+)\.(.+)", name)
    general = name if found is None else f"{found[1]}.N.{found[3]}"
    stem, _, part = general.rpartition(".")
    known = row.images.get(general) or (f"{row.images[stem]}.{part}" if stem in row.images else None)
    if known is None or found is None:
        return known
    number = int(found[2])
    if found[1] == "v.deepstack":  # by the encoder's layer, whose mergers a checkpoint numbers
        layers = () if model.vision is None else model.vision.deepstack_layers
        if number not in layers:
            return None
        number = layers.index(number)
    return known.replace(".N.", f".{number}.")


def _in_layer(row: GgufArchitecture, layer: str, inner: str) -> str | None:
    """Return the checkpoint's name of tensor `inner` (the file's name for it) of `layer`."""
    if inner in row.whole_names:
        return f"{layer}.{row.whole_names[inner]}"
    if inner in BARE:
        return f"{layer}.{row.mixer}.{BARE[inner]}"
    if inner == "exp_probs_b.bias":
        return None if row.expert_bias is None else f"{layer}.{row.expert_bias}"
    # Falcon-H1's files have one norm without a suffix.
    stem, _, part = inner.rpartition(".") if "." in inner else (inner, "", "weight")
    known = row.layer.get(stem)
    if known is None:
        return None
    for half in (GATE, UP, KEYS, VALUES):
        if known.endswith(half):
            return f"{layer}.{known.removesuffix(half)}.{part}{half}"
    return f"{layer}.{known}.{part}"


def may_be_absent(model_type: str, name: str) -> bool:
    """Return whether a file may lack a tensor, by the name of a checkpoint: a projection's bias, which is zero then."""
    is_of_projection = name.endswith(".bias") and not name.endswith(("conv1d.bias", "dt_proj.bias"))
    is_of_encoder = re.match(r"(model\.)?(vision_tower|multi_modal_projector|visual)\.", name) is not None
    return is_of_projection and not is_of_encoder and not ARCHITECTURES[model_type].needs_biases


def stores_norm_plus_one(model_type: str, name: str) -> bool:
    """Return whether the file stores a norm's weight w where the checkpoint stores w - 1."""
    is_norm = name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight")
    return is_norm and ARCHITECTURES[model_type].norms_less_one


def has_adjacent_rope(model_type: str, name: str) -> bool:
    """Return whether a tensor of a file has rows in another order than in the checkpoint (see `adjacent_rope`)."""
    is_rotated = re.fullmatch(r"blk\.\d+\.attn_(q|k|q_b|kv_a_mqa)\.(weight|bias)", name) is not None
    return is_rotated and ARCHITECTURES[model_type].adjacent_rope


def find_contiguous_tensors(header: Header, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return the matrices in blocks, by the checkpoint's names, in runs of adjacent ones. Experts are left out."""
    runs: list[list[str]] = []
    before: GgufTensor | None = None
    gate: GgufTensor | None = None
    for tensor in sorted(header.tensors.values(), key=lambda tensor: (tensor.file, tensor.begin)):
        name = _name(tensor, model)
        if name is None:
            before = gate = None
            continue
        follows = before is not None and (before.file, before.begin + before.num_bytes) == (tensor.file, tensor.begin)
        if name.endswith(GATE):
            # The run continues if the other half comes next.
            if not follows or gate is not None:
                runs.append([])
            before = gate = tensor
            continue
        if name.endswith(UP):
            if gate is None or not follows or gate.type != tensor.type:
                before = gate = None
                continue
            name = name.removesuffix(UP)
        elif not follows or gate is not None:
            runs.append([])
        runs[-1].append(name)
        before, gate = tensor, None
    return tuple(tuple(run) for run in runs if run)


def _name(tensor: GgufTensor, model: ModelSpec) -> str | None:
    """Return the checkpoint's name of a tensor; None if it is not read in place."""
    is_other_order = has_adjacent_rope(model.architecture, tensor.name)
    if tensor.type.name not in BLOCK_FORMATS or len(tensor.shape) != 2 or is_other_order:
        return None
    name = checkpoint_name(model, tensor.name)
    return None if name is None or EACH in name else name
