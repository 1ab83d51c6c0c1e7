"""The dtype of keys and values in the cache: its choice, and the bytes of a token."""

from __future__ import annotations

from ostinato.config import EngineConfig
from ostinato.plan.decision import Decision, no_effect
from ostinato.plan.layers import AttentionSpec
from ostinato.plan.model import DTYPE_BYTES, ModelSpec

INT8 = "int8"
"""Dtype of integers from -127 to 127, with a float32 scale for each token's head (`ops/int8.py`)."""

SCALE_BYTES = 4


def bytes_per_token(attention: AttentionSpec, dtype: str) -> int:
    """Return the bytes that one token adds to the cache in a layer: keys and values in `dtype`, with scales, if any."""
    elements = attention.kv_elements_per_token
    if dtype == INT8:
        return elements + elements // attention.head_dim * SCALE_BYTES
    return elements * DTYPE_BYTES[dtype]


def bytes_while_read(dtype: str) -> int:
    """Return the bytes of one element of keys and values that a reference gathers: it converts integers to float32."""
    return 1 + DTYPE_BYTES["float32"] if dtype == INT8 else DTYPE_BYTES[dtype]


def choose_kv_cache_dtype(config: EngineConfig, model: ModelSpec, dtype: str) -> tuple[str, list[Decision]]:
    """Return the dtype of keys and values: `int8` if that is given, else the model's, which runs in `dtype`."""
    if config.kv_cache_dtype != INT8:
        return dtype, []
    layers = model.attention_layers
    if not layers:
        return INT8, [no_effect(config, "kv_cache_dtype", "the model has no attention, and keeps no keys")]
    kept, plain = (sum(bytes_per_token(each, kind) for each in layers) for kind in (INT8, dtype))
    reason = (
        "rounded to 8 bits when they are written, with one scale for each token's head, and read so by every step: "
        f"{kept} bytes per token in place of {plain}; results differ slightly from those in {dtype}"
    )
    return INT8, [Decision("kv_cache_dtype", INT8, INT8, reason)]
