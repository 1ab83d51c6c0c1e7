"""The config.json that corresponds to the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.attention import attention
from ostinato.formats.gguf.delta_nets import qwen3_next, qwen35, qwen35_moe
from ostinato.formats.gguf.header import Header
from ostinato.formats.gguf.hybrids import falcon_h1, granite, granite_hybrid, lfm2, lfm2_moe, mamba2, nemotron_h
from ostinato.formats.gguf.metadata import Metadata
from ostinato.formats.gguf.names import is_changed


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
