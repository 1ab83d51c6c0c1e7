"""Elementwise functions between the two matrices of an MLP, applied to the outputs of `linear` and `moe`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gates) * values (Shazeer 2020, arXiv 2002.05202).

    `x` [..., 2 * size], gates first -> [..., size].
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _geglu(x: torch.Tensor) -> torch.Tensor:
    """Return the result of `_swiglu` with the tanh approximation of GELU in place of SiLU."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu2": _relu2,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activation functions by name.

`relu2` is the squared ReLU. `swiglu` and `geglu` halve the last dimension (`results.GATED`). `gelu` is x times the
normal distribution's integral up to x (Hendrycks and Gimpel 2016, arXiv 1606.08415); `gelu_pytorch_tanh` is the tanh
approximation given there.
"""
