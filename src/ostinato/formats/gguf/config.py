"""The config.json that the metadata of a GGUF file stands for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ostinato.errors import ModelError
from ostinato.formats.gguf.header import Header

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those that are read, by the name that both formats have for them."""

_ROPE_SCALINGS = ("none", "linear", "yarn")


def config_of(header: Header) -> dict[str, Any]:
    """As transformers would write it. ModelError for another architecture, for what is missing, and for what such a
    model cannot be run with."""
    metadata = _Metadata(header)
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path} has a model of architecture {architecture!r}; GGUF files are read of {known}")
    if metadata.optional("expert_count"):
        raise ModelError(f"{header.path} has a {architecture} model of experts; GGUF files are read of models without")
    if "rope_freqs.weight" in header.tensors:
        raise ModelError(f"{header.path} scales its positions by rope_freqs.weight (Llama 3.1), which is not read yet")
    heads = metadata.integer("attention.head_count")
    config: dict[str, Any] = {
        "model_type": architecture,
        "dtype": _dtype(header),
        "vocab_size": len(header.metadata.get("tokenizer.ggml.tokens", ())) or metadata.integer("vocab_size"),
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.optional("attention.head_count_kv") or heads,
        "head_dim": metadata.optional("attention.key_length") or metadata.integer("embedding_length") // max(heads, 1),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": _shortest(metadata.required("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.optional("rope.freq_base") or 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    window = metadata.optional("attention.sliding_window")
    if window and window < config["max_position_embeddings"]:
        raise ModelError(
            f"{header.path} has attention.sliding_window = {window}; supported: attention over the whole context of "
            f"{config['max_position_embeddings']} tokens"
        )
    return config


class _Metadata:
    """The values under the architecture's name."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._values = header.metadata

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise ModelError(f"{self._header.path} has {name} = {value!r}, which should be a text")
        return value

    def optional(self, name: str) -> Any:
        return self._values.get(f"{self._values['general.architecture']}.{name}")

    def required(self, name: str) -> Any:
        value = self.optional(name)
        if value is None:
            raise ModelError(f"{self._header.path} has no {self._values['general.architecture']}.{name}")
        return value

    def integer(self, name: str) -> int:
        value = self.required(name)
        if type(value) is not int:
            raise ModelError(f"{self._header.path} has {name} = {value!r}, which should be one whole number")
        return value


def _dtype(header: Header) -> str:
    """That of the weights as they are stored, or that blocks are expanded to: bfloat16."""
    floats = {place.type.name for place in header.tensors.values() if len(place.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(floats.pop(), "bfloat16") if len(floats) == 1 else "bfloat16"


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    kind = metadata.optional("rope.scaling.type") or "none"
    if kind not in _ROPE_SCALINGS:
        known = ", ".join(_ROPE_SCALINGS)
        raise ModelError(f"a GGUF file has rope.scaling.type = {kind!r}; supported: {known}")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.required("rope.scaling.factor")}
    original = metadata.optional("rope.scaling.original_context_length")
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _shortest(value: float) -> float:
    """A float32 as the shortest decimal that means it, which is what the model's author wrote."""
    return float(str(np.float32(value)))
