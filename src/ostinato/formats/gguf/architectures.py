"""The config.json that corresponds to the metadata of a GGUF file, and its tensors that are read in place.

A matmul may need several tensors as one matrix, such as gates and what they gate. They are one matrix if they are
adjacent in the file, as most writers put these two. Tensors whose rows a checkpoint has in another order, such as
queries and keys of Llama, are copied. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.metadata import Metadata
from ostinato.formats.gguf.model_configs import (
    attention,
    falcon_h1,
    granite,
    granite_hybrid,
    lfm2,
    lfm2_moe,
    mamba2,
    nemotron_h,
    qwen3_next,
    qwen35,
    qwen35_moe,
)
from ostinato.formats.gguf.reader import GgufTensor, Header
from ostinato.formats.gguf.tensor_names import EACH, GATE, UP, checkpoint_name, has_adjacent_rope, is_changed
from ostinato.ops.quant.block_formats import BLOCK_FORMATS

if TYPE_CHECKING:
    from ostinato.plan.model import ModelSpec


def config_of(header: Header) -> dict[str, Any]:
    """Return the config.json that transformers would write.

    Raises ModelError for another architecture, for what is missing, and for what such a model cannot be run with.
    """
    metadata = Metadata(header)
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path} has a model of architecture {architecture!r}; GGUF files are read of {known}")
    if metadata.num_head_layers and architecture not in WITH_HEADS:
        raise ModelError(
            f"{header.path} has a prediction head (nextn_predict_layers); GGUF files are read with one of "
            f"{', '.join(WITH_HEADS)}; convert the model without it"
        )
    config = _shared(metadata) | ARCHITECTURES[architecture](metadata)
    window = metadata.optional("attention.sliding_window")
    if window and window < metadata.integer("context_length"):
        raise ModelError(
            f"{header.path} has attention.sliding_window = {window}; supported: attention over the whole context of "
            f"{metadata.integer('context_length')} tokens"
        )
    return config


def _shared(metadata: Metadata) -> dict[str, Any]:
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


def _llama(metadata: Metadata) -> dict[str, Any]:
    if metadata.optional("expert_count"):
        raise ModelError(
            f"{metadata.header.path} has a {metadata.architecture} model of experts; GGUF files are read of models "
            "without"
        )
    return {
        "model_type": metadata.architecture,
        **attention(metadata),
        "intermediate_size": metadata.integer("feed_forward_length"),
    }


ARCHITECTURES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "granite": granite,
    "granitehybrid": granite_hybrid,
    "falcon-h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "mamba2": mamba2,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    "qwen35": qwen35,
    "qwen35moe": qwen35_moe,
    "qwen3next": qwen3_next,
}
"""Readers of architectures: llama.cpp's name -> function that makes the rest of the config.json."""

WITH_HEADS = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures that may have a prediction head."""


def _dtype(header: Header) -> str:
    """Return the dtype of the weights as stored; bfloat16 if there are blocks or several types."""
    matrices = (place for place in header.tensors.values() if len(place.shape) > 1 and not is_changed(place.name))
    types = {place.type.name for place in matrices}
    return {"F32": "float32", "F16": "float16"}.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def find_contiguous_tensors(header: Header, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return the matrices in blocks, by the checkpoint's names, in runs of adjacent ones.

    Experts are not among them.
    """
    runs: list[list[str]] = []
    before: GgufTensor | None = None
    gate: GgufTensor | None = None
    for tensor in sorted(header.tensors.values(), key=lambda tensor: (tensor.file, tensor.begin)):
        name = _name(tensor, model)
        if name is None:
            before = gate = None
            continue
        follows = before is not None and (before.file, _end(before)) == (tensor.file, tensor.begin)
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


def _end(tensor: GgufTensor) -> int:
    return tensor.begin + tensor.num_bytes
