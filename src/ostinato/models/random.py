"""Random weights of a model's real shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

import torch

from ostinato.layers.build import BlockView, QuantizedView, checkpoint_views
from ostinato.models.base import CausalLM
from ostinato.ops.blocks.quantizers import BY_TORCH, Quantizers

PERIOD = 1_000_003
"""Normal values that are drawn; all matrices are made of them, each from another on, for drawing every value would take
seconds. A prime, so that no two rows of a matrix are equal."""


def randomize_weights(model: CausalLM, seed: int, quantizers: Quantizers = BY_TORCH) -> None:
    """Fills every weight so that activations stay finite and of ordinary size at any depth and length.

    Matrices are normal with variance 1 / inputs, norms are 1, biases 0; a state layer's decay and time step lie in
    the ranges that Mamba-2 is initialised in (Dao and Gu 2024, appendix D).
    """
    device = model.embedding.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = torch.empty(PERIOD, device=device).normal_(generator=generator).repeat(2)
    less_one = {name for _, _, row in model.weights() if row.is_less_one for name in row.names}
    for name, view in checkpoint_views(model):
        kind = name.rpartition(".")[2]
        if isinstance(view, QuantizedView | BlockView):
            if isinstance(view, BlockView) and view.order is not None:
                torch.arange(len(view.order), out=view.order)
            begin = int(torch.randint(PERIOD, (), device=device, generator=generator))
            _quantize(view.flat(), drawn, begin, quantizers)
        elif kind == "A_log":
            view.uniform_(1, 16, generator=generator).log_()
        elif kind == "dt_bias" or name.endswith("dt_proj.bias"):
            step = torch.empty_like(view).uniform_(0.001, 0.1, generator=generator)
            view.copy_(step + torch.log(-torch.expm1(-step)))
        elif view.dim() == 1:
            view.fill_(0.0 if kind.endswith("bias") or name in less_one else 1.0)
        else:
            begin = int(torch.randint(PERIOD, (), device=device, generator=generator))
            _fill(view, drawn[begin : begin + min(PERIOD, view.numel())] * view.shape[-1] ** -0.5)


def _quantize(view: QuantizedView | BlockView, drawn: torch.Tensor, begin: int, quantizers: Quantizers) -> None:
    """Fills `view` with the values from `begin` on, as often as it takes."""
    rows, columns = view.shape
    step = max(1, PERIOD // columns // 8)
    for row in range(0, rows, step):
        end = min(rows, row + step)
        first = (begin + row * columns) % PERIOD
        values = drawn[first : first + (end - row) * columns].view(-1, columns) * columns**-0.5
        view.rows(row, end).put(values, quantizers)


def _fill(view: torch.Tensor, values: torch.Tensor) -> None:
    """Fills `view` with `values`, repeated as often as it takes."""
    if view.is_contiguous():
        for piece in view.view(-1).split(len(values)):
            piece.copy_(values[: len(piece)])
    else:
        view.copy_(values.repeat(-(-view.numel() // len(values)))[: view.numel()].view(view.shape))
