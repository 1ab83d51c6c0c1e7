"""Rules for the shapes and dtypes of operations' results (`ops.facts.Result`)."""

from __future__ import annotations

from typing import Any

from ostinato.ops.blocks.formats import BLOCK_FORMATS, Blocks

GATED = ("swiglu", "geglu")
"""Activations (`ops/activations.py`) whose inputs are gates followed by an equal number of values to gate."""


def like_first(x: Any, /, *_: Any, **__: Any) -> Any:
    return x.shape, x.dtype


def axial_angles_shape(positions: Any, axes: Any, frequencies: Any, scaling: float) -> Any:
    return (2, positions.shape[0], frequencies.shape[0]), "float32"


def concat_shape(first: Any, second: Any) -> Any:
    return (first.shape[0], first.shape[1] + second.shape[1]), first.dtype


def delta_rule_shape(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return v.shape, v.dtype


def embedding_shape(
    token_ids: Any,
    weight: Any,
    multiplier: float,
    weight_scale: Any = None,
    group_size: int | None = None,
    out_dtype: Any = None,
    blocks: Blocks | None = None,
) -> Any:
    if blocks is not None:
        kind = BLOCK_FORMATS[blocks[0][0]]
        return (token_ids.shape[0], weight.shape[1] // kind.num_bytes * kind.elements), out_dtype
    return (token_ids.shape[0], weight.shape[1]), weight.dtype if weight_scale is None else out_dtype


def embedding_of_ranks_shape(token_ids: Any, weight: Any, multiplier: float, first: int, own: Any, *how: Any) -> Any:
    return embedding_shape(token_ids, weight, multiplier, *how)


def gather_columns_shape(x: Any, starts: Any, num_columns: int) -> Any:
    return (x.shape[0], num_columns), x.dtype


def gated_activation_shape(x: Any, activation: str) -> Any:
    return (x.shape[0], x.shape[1] // 2), x.dtype


def gated_rms_norm_shape(x: Any, gate: Any, *_: Any, **__: Any) -> Any:
    return x.shape, gate.dtype


def linear_shape(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
    scale: Any = None,
    out_dtype: Any = None,
    weight_scale: Any = None,
    group_size: int | None = None,
    blocks: Blocks | None = None,
    order: Any = None,
) -> Any:
    outputs = weight.shape[0] if blocks is None else sum(rows for _, rows in blocks)
    return (x.shape[0], outputs // 2 if activation in GATED else outputs), out_dtype or x.dtype


def rms_norm_shape(x: Any, weight: Any, *_: Any, **__: Any) -> Any:
    return x.shape, weight.dtype


def rms_norm_of_ranks_shape(x: Any, weight: Any, eps: float, num_ranks: int, gate: Any = None, *_: Any, **__: Any) -> Any:
    return x.shape, (weight if gate is None else gate).dtype


def rotary_shape(q: Any, k: Any, v: Any, angles: Any, *_: Any, **__: Any) -> Any:
    return q if angles is None else (q.shape, q.dtype)


def rotary_angles_shape(positions: Any, frequencies: Any, scaling: float) -> Any:
    return (2, positions.shape[0], frequencies.shape[0]), "float32"


def route_shape(x: Any, weight: Any, correction_bias: Any, top_k: int, *_: Any, **__: Any) -> Any:
    return (x.shape[0], 2, top_k), "float32"


def sample_shape(logits: Any, *_: Any, **__: Any) -> Any:
    return (logits.shape[0],), "int32"


def weighted_embedding_shape(ids: Any, weights: Any, table: Any) -> Any:
    return (ids.shape[0], table.shape[1]), table.dtype
