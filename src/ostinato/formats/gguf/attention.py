"""Heads and positions from the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from typing import Any

from ostinato.errors import ModelError
from ostinato.formats.gguf.metadata import Metadata
from ostinato.formats.gguf.rope import rope_scaling


def attention(metadata: Metadata, *, heads_of_layers: bool = False, rotates_parts: bool = False) -> dict[str, Any]:
    """Return heads and positions, as in a config.json.

    Raises ModelError for heads that are rotated in part, unless the model `rotates_parts`. With `heads_of_layers` the
    file has a number of key heads for each layer, which is 0 in layers of another kind.
    """
    heads = metadata.integer("attention.head_count")
    head_dim = metadata.optional("attention.key_length") or metadata.rows("attn_q.weight") // max(heads, 1)
    head_dim = head_dim or metadata.integer("embedding_length") // max(heads, 1)
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not rotates_parts:
        raise ModelError(
            f"{metadata.header.path} rotates {rotated} elements of heads of {head_dim} (rope.dimension_count); "
            "supported: all of them"
        )
    name = "attention.head_count_kv"
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.largest(name) if heads_of_layers else metadata.optional(name) or heads,
        "head_dim": head_dim,
        "attention_bias": metadata.has("attn_q.bias"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(metadata),
    }
