"""References of the matmuls of a layer: `linear`, and `moe` with its `route` and gated activations.

`linear` is y = x W^T + b, followed by a layer's steps on its outputs: scale, activation, residual. `route` chooses the
experts of each token and their weights, and `moe` computes them. `gated_activation` is the second half of each token's
values, gated by the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F

from ostinato.ops.quant import dequantize as in_blocks
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import Blocks
from ostinato.ops.sizes import DEQUANT_SLAB, INT8_LEAST_EXPONENT, MAX_INT8


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gates) * values (Shazeer 2020, arXiv 2002.05202). `x` [..., 2 * size], gates first -> [..., size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _geglu(x: torch.Tensor) -> torch.Tensor:
    """Return the result of `_swiglu` with the tanh approximation of GELU in place of SiLU."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": _swiglu,
    "geglu": _geglu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activation functions by name.

`relu2` is the squared ReLU. `swiglu` and `geglu` halve the last dimension (`operations.GATED`). `gelu` is x times the
normal distribution's integral up to x (Hendrycks and Gimpel 2016, arXiv 1606.08415); `gelu_pytorch_tanh` is the tanh
approximation given there.
"""


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float, offset: float) -> torch.Tensor:
    """Return gates * sigmoid(alpha * gates) * (values + offset), gates of at most and values within `limit`.

    The offset is 1 in gpt-oss. In GLM-5.3 alpha is 1 and the offset 0. `x` [..., 2 * size], gates first -> [..., size].
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def gated_activation(x: torch.Tensor, activation: str, clamp: tuple[float, float, float] | None = None) -> torch.Tensor:
    """Return activation(gates) * values for `x` [tokens, 2 * size], the gates first -> [tokens, size].

    Computed in float32 (Shazeer 2020, arXiv 2002.05202). `activation` is one of `ACTIVATIONS` that does not halve the
    last dimension. With `clamp` it is silu, and `clamped_swiglu` with this alpha, limit and offset is computed.
    `linear` applies a gated activation itself if nothing is added to its result first.
    """
    if clamp is not None:
        return clamped_swiglu(x.float(), *clamp).to(x.dtype)
    gates, values = x.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gates) * values).to(x.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    blocks: Blocks | None = None,
    order: torch.Tensor | None = None,
    int8_activations: bool = False,
) -> torch.Tensor:
    """Return activation((x W^T + bias) * scale) + residual.

    `x` [tokens, in] and `weight` [out, in] in one dtype, `bias` [out]; `scale` [out] float32. `activation` is one of
    `ACTIVATIONS`; with those of `operations.GATED` the first half of the outputs are the gates, and the result has half
    as many columns. `residual` has the shape of the result, [tokens, out or out / 2], in the dtype of `x`, or in
    `out_dtype` if that is given. With `weight_scale` float32 [out] or [out, groups], `weight` is int8 (see
    `ops.quant.quantize`) and multiplied exactly. With `blocks`, `weight` is uint8, with its rows in these formats one
    after the other (see `ops.quant.block_formats`), and multiplied exactly too. `order` int32 [in] maps each element of
    a weight row to its input; without it, element i belongs to input i. With `int8_activations`, `x` is quantised too
    (see `quantize_tokens`); weights are int8 with a scale per row.

    `x` may have heads, [tokens, heads, in]: each is multiplied by its own rows of `weight` [heads * out, in], without
    more steps -> [tokens, heads, out].
    """
    if x.dim() == 3:
        parts = weight.chunk(x.shape[1])
        return torch.stack([F.linear(x[:, head], part) for head, part in enumerate(parts)], dim=1)
    if order is not None:
        x = x.index_select(1, order)
    if blocks is not None:
        y = _product(x, in_blocks.slabs(weight, blocks, x.shape[1]), bias)
    elif weight_scale is None:
        y = F.linear(x, weight, bias)
    elif int8_activations:
        y = _int8_product(x, weight, weight_scale, bias)
    else:
        y = _quantized_product(x, weight, weight_scale, group_size, bias)
    if out_dtype is not None:
        y = y.to(out_dtype)
    if scale is not None:
        y.mul_(scale)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y.add_(residual)


def _quantized_product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, group_size: int | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x W^T + bias in the dtype of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = max(1, DEQUANT_SLAB // weight.shape[1])
    parts = zip(weight.split(rows), weight_scale.to(wide).split(rows), strict=True)
    return _product(x, (quantize.dequantize(slab, scale, group_size) for slab, scale in parts), bias)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each token of `x` [tokens, in] -> int8 [tokens, in], and scales float32 [tokens].

    x = scale * integer, and the largest magnitude becomes 127: integer = x * (127 / largest), rounded to nearest, ties
    to even; scale = largest / 127 (absmax; Dettmers et al. 2022, arXiv 2208.07339, section 2.1). A token without
    magnitudes above 2 to the power of `INT8_LEAST_EXPONENT` counts as zeros. With an element that is not finite, the
    scale is NaN and so are all of the token's results.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else wide.new_zeros(len(x), 1)
    is_finite, counts = largest.isfinite(), largest > 2.0**INT8_LEAST_EXPONENT
    # A number over a tensor is its reciprocal times the number in torch, with two roundings.
    factor = torch.where(is_finite & counts, torch.full_like(largest, MAX_INT8) / largest, 0.0)
    scale = torch.where(is_finite, torch.where(counts, largest / MAX_INT8, 0.0), torch.nan)
    integers = torch.where(is_finite, (wide * factor).round(), 0.0).to(torch.int8)
    return integers, scale.squeeze(-1)


def _int8_product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the product of int8 tokens and rows, exact before it is scaled, plus bias, in the dtype of `x`."""
    integers, scale = quantize_tokens(x)
    rows = max(1, DEQUANT_SLAB // weight.shape[1])
    # float64 holds each sum of up to `INT8_MAX_K` products.
    sums = [F.linear(integers.double(), slab.double()) for slab in weight.split(rows)]
    y = torch.cat(sums, dim=1).float() * scale[:, None] * weight_scale
    return (y if bias is None else y + bias).to(x.dtype)


def _product(x: torch.Tensor, slabs: Iterable[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + bias in the dtype of `x`, computed in at least float32, one slab of rows at a time."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.cat([F.linear(x.to(wide), slab.to(wide)) for slab in slabs], dim=1)
    return (y if bias is None else y + bias).to(x.dtype)


def moe(
    x: torch.Tensor,
    choices: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    up_blocks: Blocks | None = None,
    down_blocks: Blocks | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamp: tuple[float, float, float] | None = None,
) -> torch.Tensor:
    """Sum weight * down(activation(up(x))) over each token's experts, plus `residual`.

    `x` and `residual` [tokens, in]; `choices` [tokens, 2, k] float32 as returned by `route`: the ids of experts and
    their weights; `up` [experts, inner, in] (for a gated activation twice as many rows, gates first); `down` [experts,
    in, inner]. With `up_scale` float32 [experts, inner] or [experts, inner, groups], and `down_scale` alike, the
    weights are int8 (see `ops.quant.quantize`) and multiplied exactly. With `up_blocks` and `down_blocks`, the row
    formats of one expert, they are uint8 [experts, rows, bytes of a row] (see `ops.quant.block_formats`). `up_bias`
    [experts, inner] and `down_bias` [experts, in] float32 are added to the matmuls' results. With `clamp`, the
    activation is `clamped_swiglu` with this alpha, limit and offset. Experts are added up in float32, in ascending
    order. -> [tokens, in] in the dtype of `x`.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    expert_ids, expert_weights = choices.unbind(1)
    biases = up_bias, down_bias
    for expert in expert_ids.unique().tolist():
        token, choice = torch.where(expert_ids == expert)
        up_of, down_of = (None if scale is None else scale[int(expert)] for scale in (up_scale, down_scale))
        up_added, down_added = (None if all_of is None else all_of[int(expert)].to(x.dtype) for all_of in biases)
        applied = activation if clamp is None else None
        inner = linear(x[token], up[int(expert)], up_added, None, applied, None, None, up_of, group_size, up_blocks)
        if clamp is not None:
            inner = clamped_swiglu(inner, *clamp)
        y = linear(inner, down[int(expert)], down_added, None, None, None, None, down_of, group_size, down_blocks)
        out.index_add_(0, token, y.float() * expert_weights[token, choice].unsqueeze(-1))
    out = out.to(x.dtype)
    return out if residual is None else out.add_(residual)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = False,
    scaling: float = 1.0,
    softmax_over_all: bool = False,
    sum_epsilon: float = 1e-20,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the `top_k` best experts of each token by the scores x W^T, of equal ones the lowest.

    Scores are computed in float32, plus the `bias` [experts] float32 if there is one. `x` [tokens, hidden], `weight`
    [experts, hidden]. A `correction_bias` [experts] float32 means sigmoid routing (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2): the weights are the sigmoids of the scores, divided by their sum plus `sum_epsilon` if `normalize`.
    That bias is added for the selection alone, which considers only the `top_groups` groups with the greatest sums of
    their two best scores. Without it, the weights are the softmax over the chosen scores, or with `softmax_over_all`
    the chosen entries of the softmax over all. All are multiplied by `scaling`, and each by its expert's entry of
    `expert_scales` [experts] float32, if there are some (Gemma 4).

    -> [tokens, 2, top_k] float32: the ids of the experts, best first, and their weights.
    """
    scores = F.linear(x.float(), weight.float(), bias)
    if correction_bias is None:
        ids = _best(scores, top_k)
        weights = scores.softmax(-1).gather(1, ids) if softmax_over_all else scores.gather(1, ids).softmax(-1)
    else:
        probabilities = scores.sigmoid()
        ids = _best(_allowed(probabilities + correction_bias, num_groups, top_groups), top_k)
        weights = probabilities.gather(1, ids)
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + sum_epsilon)
    weights = weights * scaling if expert_scales is None else weights * scaling * expert_scales[ids]
    return torch.stack((ids.float(), weights), dim=1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of each row's greatest values, of equal ones the first -> [rows, count] int64."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _allowed(choice: torch.Tensor, num_groups: int, top_groups: int) -> torch.Tensor:
    """Return `choice` with -inf outside the `top_groups` best groups."""
    if num_groups == 1:
        return choice
    grouped: torch.Tensor = choice.unflatten(-1, (num_groups, -1))
    best = _best(grouped.topk(2, dim=-1).values.sum(-1), top_groups)
    allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
