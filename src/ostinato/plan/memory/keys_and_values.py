"""The dtype of keys and values in the cache: which one a plan has, and what a token takes in it."""

from __future__ import annotations

from ostinato.config import EngineConfig
from ostinato.plan.decision import Decision, without_effect
from ostinato.plan.layers import AttentionSpec
from ostinato.plan.model import DTYPE_BYTES, ModelSpec

INT8 = "int8"
"""Integers from -127 to 127, with a float32 scale for each token's head (`ops/int8.py`)."""

SCALE_BYTES = 4


def bytes_per_token(attention: AttentionSpec, dtype: str) -> int:
    """What one token adds to the cache in a layer: its keys and values in `dtype`, and their scales, if there are
    any."""
    elements = attention.kv_elements_per_token
    if dtype == INT8:
        return elements + elements // attention.head_dim * SCALE_BYTES
    return elements * DTYPE_BYTES[dtype]


def bytes_while_read(dtype: str) -> int:
    """Bytes of one element of the keys and values that a reference gathers: it widens integers to float32."""
    return 1 + DTYPE_BYTES["float32"] if dtype == INT8 else DTYPE_BYTES[dtype]


def choose_kv_cache_dtype(config: EngineConfig, model: ModelSpec, dtype: str) -> tuple[str, list[Decision]]:
    """The dtype of keys and values: `int8` if that is given, else the model's, which runs in `dtype`."""
    if config.kv_cache_dtype != INT8:
        return dtype, []
    layers = model.attention_layers
    if not layers:
        return INT8, [without_effect(config, "kv_cache_dtype", "the model has no attention, and keeps no keys")]
    kept, plain = (sum(bytes_per_token(each, kind) for each in layers) for kind in (INT8, dtype))
    reason = (
        "rounded to 8 bits when they are written, with one scale for each token's head, and read so by every step: "
        f"{kept} bytes per token in place of {plain}; results differ slightly from those in {dtype}"
    )
    return INT8, [Decision("kv_cache_dtype", INT8, INT8, reason)]
