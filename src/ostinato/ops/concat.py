"""concat: two vectors of each token, one behind the other."""

from __future__ import annotations

import torch

from ostinato.ops.native import Lowered, check_rows


def reference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`first` [tokens, a], `second` [tokens, b] in one dtype -> [tokens, a + b]"""
    return torch.cat((first, second), dim=-1)


def lower(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> Lowered:
    """As the reference."""
    check_rows("concat", first, second)
    assert first.dtype == second.dtype, "concat: one dtype"
    return first.shape[0], {
        "first": first,
        "second": second,
        "out": out,
    }
