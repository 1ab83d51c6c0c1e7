"""References of the operations that pass over activations: norms, embeddings, joins.

The norms are `rms_norm` (Zhang and Sennrich 2019, equation 4), `gated_rms_norm` with a gate before or after it, and
`layer_norm` (Ba et al. 2016, arXiv 1607.06450). `weighted_embedding` sums learned vectors, such as position embeddings
between the learned ones. `inject_media` places encoder outputs for the tokens of images among the hidden states of
text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.quant import dequantize as in_blocks
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import Blocks


def add(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Add `first` and `second` [tokens, size] in one dtype, rounded once; `second` may have one row for all."""
    return first + second


def concat(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Concatenate `first` [tokens, a] and `second` [tokens, b], in one dtype -> [tokens, a + b].

    Both may have heads: [tokens, heads, a] and [tokens, heads, b] -> [tokens, heads, a + b].
    """
    return torch.cat((first, second), dim=-1)


def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    multiplier: float,
    weight_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """Return the rows of `weight` [vocab, hidden] for `token_ids` [tokens] int64, times `multiplier`.

    -> [tokens, hidden] in `out_dtype`: float32 or by default the dtype of `weight`. With `weight_scale` float32
    [vocab] or [vocab, groups], `weight` is int8 (see `ops.quant.quantize`). With `blocks`, `weight` is uint8 [vocab,
    bytes of a row] in one block format (see `ops.quant.block_formats`). Both need an `out_dtype`, which may be any
    float.
    """
    if blocks is not None:
        ((name, _),) = blocks
        vectors = in_blocks.dequantize(name, F.embedding(token_ids, weight))
        return (vectors * multiplier).to(out_dtype)
    if weight_scale is not None:
        vectors = quantize.dequantize(F.embedding(token_ids, weight), weight_scale[token_ids], group_size)
        return (vectors * multiplier).to(out_dtype)
    vectors = F.embedding(token_ids, weight).to(out_dtype or weight.dtype)
    return vectors if multiplier == 1.0 else vectors * multiplier


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias.

    `x` [tokens, size], `weight` and `bias` [size] in one dtype -> [tokens, size]; computed in float32.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def weighted_embedding(ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Sum weights[:, i] * table[ids[:, i]] over i, in float32.

    `ids` [tokens, count] int64, `weights` [tokens, count] float32, `table` [rows, hidden] -> [tokens, hidden] in the
    dtype of `table`.
    """
    total = torch.zeros(ids.shape[0], table.shape[1], dtype=torch.float32, device=ids.device)
    for of_ids, of_weights in zip(ids.unbind(1), weights.unsqueeze(-1).unbind(1), strict=True):
        total += F.embedding(of_ids, table) * of_weights
    return total.to(table.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool = False,
    gate_is_sigmoid: bool = False,
) -> torch.Tensor:
    """Normalise each group of `group_size` channels by its root mean square, with a gate.

    The gate is silu(`gate`), or sigmoid(`gate`) if `gate_is_sigmoid` (Kimi Linear). Computed in float32.

    `x` and `gate` [tokens, size], `weight` [size], or [group_size] for all groups -> [tokens, size] in the dtype of
    `gate`. The gate multiplies the input of the norm, or with `norm_before_gate` its output. Without a weight there is
    no norm, only the gate, which may then be that of heads: [tokens, heads, size / heads], or [tokens, heads] with one
    gate for all channels of a head.
    """
    if gate.shape != x.shape:
        assert weight is None, "gates of heads stand alone"
        by_head = gate if gate.dim() == 3 else gate.unsqueeze(2)
        gate = by_head.expand(-1, -1, x.shape[1] // gate.shape[1]).flatten(1)
    by = gate.float().sigmoid() if gate_is_sigmoid else F.silu(gate.float())
    if weight is None:
        return (x.float() * by).to(gate.dtype)
    assert group_size is not None, "a norm averages over groups of channels"
    y = x.float() if norm_before_gate else x.float() * by
    grouped: torch.Tensor = y.unflatten(-1, (-1, group_size))
    weights = weight.float().unflatten(0, (-1, group_size))
    y = F.rms_norm(grouped, (group_size,), None, eps).mul(weights).flatten(-2)
    return (y * by if norm_before_gate else y).to(gate.dtype)


def clip(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Clip `x` [tokens, size] to `bounds` [2] float32, a least and a most value -> [tokens, size]. NaN stays NaN."""
    least, most = bounds
    return x.float().clamp(least, most).to(x.dtype)


def inject_media(x: torch.Tensor, media_cells: torch.Tensor, media: torch.Tensor, row: int, add: bool) -> torch.Tensor:
    """Replace each token's hidden state by row `row` of its cell, in place, or with `add` add that row to it.

    Tokens with cell 0 keep their hidden state. `x` [tokens, hidden]; `media_cells` [tokens] int64; `media` [cells,
    rows, hidden] in the dtype of `x`. -> `x`.

    Cell 0 may contain anything, including NaN.
    """
    rows = media.select(1, row).index_select(0, media_cells)
    return x.copy_(torch.where(media_cells.unsqueeze(1) > 0, x + rows if add else rows, x))


def multiply(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Multiply `first` and `second` [tokens, size], in one dtype -> [tokens, size], each product rounded once.

    `second` may have one row for all tokens. It may have one column for all channels, also in float32.
    """
    return (first * second).to(first.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise `x` [..., size] by its root mean square and multiply by `weight` [size] plus `offset`.

    -> [..., size] in the dtype of `weight`, to which `x` is rounded first; the mean is taken in float32. `offset` and
    weight are added in float32: Gemma and Qwen3-Next store the weight less 1. `residual`, which has the result's shape,
    is added last.
    """
    size = (x.shape[-1],)
    x = x.to(weight.dtype)
    if x.dtype == torch.float32:
        y = F.rms_norm(x, size, weight + offset if offset else weight, eps)
        return y if residual is None else y + residual
    y = F.rms_norm(x.float(), size, weight.float() + offset, eps)
    return (y if residual is None else y + residual.float()).to(weight.dtype)
