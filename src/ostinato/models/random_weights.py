"""Random weights of a model's real shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

from math import prod

import torch

from ostinato.layers.allocation import BlockView, QuantizedView, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.models.loader import deinterleave
from ostinato.models.weight_shards import TensorShard, tensor_shards
from ostinato.ops.quant.quantize import BY_TORCH, WeightQuantizers

PERIOD = 1_000_003
"""Number of normal values that are generated.

All matrices repeat them, each from another offset, since generating every value would take seconds. It is a prime, so
that no two rows of a matrix are equal.
"""


def randomize_weights(model: CausalLM, seed: int, quantizers: WeightQuantizers = BY_TORCH) -> None:
    """Fill every weight so that activations stay finite and of ordinary size at any depth and length.

    Matrices are normal with variance 1 / inputs, norms are 1, biases 0; a state layer's decay and time step are in the
    ranges that Mamba-2 is initialised in (Dao and Gu 2024, appendix D). With a sharded model, each rank has its part of
    the values that a single process would have.
    """
    device = model.embedding.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = torch.empty(PERIOD, device=device).normal_(generator=generator).repeat(2)
    less_one = {name for _, _, row in model.weights() if row.stored_minus_one for name in row.names}
    shares = tensor_shards(model)

    def uniform(view: torch.Tensor, share: TensorShard | None, low: float, high: float) -> torch.Tensor:
        """Generate values for the whole tensor, so that the random state stays the same on all ranks."""
        values = view.new_empty(view.shape if share is None else share.shape).uniform_(low, high, generator=generator)
        return values if share is None else share.read(values)

    for name, view in checkpoint_views(model):
        kind, share = name.rpartition(".")[2], shares.get(name)
        if isinstance(view, QuantizedView | BlockView):
            begin = int(torch.randint(PERIOD, (), device=device, generator=generator))
            _quantize(view, share, drawn, begin, quantizers)
        elif kind == "A_log":
            view.copy_(uniform(view, share, 1, 16).log_())
        elif kind == "dt_bias" or name.endswith("dt_proj.bias"):
            step = uniform(view, share, 0.001, 0.1)
            view.copy_(step + torch.log(-torch.expm1(-step)))
        elif view.dim() == 1:
            view.fill_(0.0 if kind.endswith("bias") or name in less_one else 1.0)
        else:
            begin = int(torch.randint(PERIOD, (), device=device, generator=generator))
            if share is None:
                _fill(view, drawn[begin : begin + min(PERIOD, view.numel())] * view.shape[-1] ** -0.5)
            else:
                _fill_part(view, share, drawn * share.shape[-1] ** -0.5, begin)
    # The rows are in a checkpoint's order here, as after its loader.
    deinterleave(model)


def _quantize(
    place: QuantizedView | BlockView,
    share: TensorShard | None,
    drawn: torch.Tensor,
    begin: int,
    quantizers: WeightQuantizers,
) -> None:
    """Fill `place` with the values from offset `begin`, repeated as needed, or with a rank's part of them."""
    whole = place if share is None else share.allocate_full(place)
    assert not isinstance(whole, torch.Tensor), "it is of the same kind"
    if isinstance(whole, BlockView) and whole.order is not None:
        torch.arange(len(whole.order), out=whole.order)
    # A share's whole tensor is on the host.
    _quantize_rows(whole.flat(), drawn if share is None else drawn.cpu(), begin, quantizers)
    if share is not None:
        share.copy_shard(whole, place)


def _quantize_rows(
    view: QuantizedView | BlockView, drawn: torch.Tensor, begin: int, quantizers: WeightQuantizers
) -> None:
    rows, columns = view.shape
    drawn = drawn.repeat(1 + columns // PERIOD)  # a row may be longer than the period
    step = max(1, PERIOD // columns // 8)
    for row in range(0, rows, step):
        end = min(rows, row + step)
        first = (begin + row * columns) % PERIOD
        values = drawn[first : first + (end - row) * columns].view(-1, columns) * columns**-0.5
        view.rows(row, end).quantize_into(values, quantizers)


def _fill(view: torch.Tensor, values: torch.Tensor) -> None:
    """Fill `view` with `values`, repeated as needed."""
    if view.is_contiguous():
        for piece in view.view(-1).split(len(values)):
            piece.copy_(values[: len(piece)])
    else:
        view.copy_(values.repeat(-(-view.numel() // len(values)))[: view.numel()].view(view.shape))


def _fill_part(view: torch.Tensor, share: TensorShard, drawn: torch.Tensor, begin: int) -> None:
    """Fill `view` with its `share` of a tensor that the values from offset `begin` fill.

    It works row by row: a row is an index of the dimensions before the sharded one, with all dimensions after it.
    """
    rows, columns = prod(share.shape[: share.dim]), prod(share.shape[share.dim :])
    inner = columns // share.shape[share.dim]
    own = view.new_empty(rows, view.numel() // rows)
    at_once = max(1, PERIOD // columns)
    for row in range(0, rows, at_once):
        count, place = min(at_once, rows - row), 0
        for first, end in share.parts:
            for column in range(first * inner, end * inner, PERIOD):
                size = min(PERIOD, end * inner - column)
                start = (begin + row * columns + column) % PERIOD
                values = drawn[start:].as_strided((count, size), (columns, 1))
                own[row : row + count, place : place + size] = values
                place += size
    view.copy_(own.view(view.shape))
