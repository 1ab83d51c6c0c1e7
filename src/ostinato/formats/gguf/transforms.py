"""Conversion of tensors that a GGUF file has in another form: values of state layers, and rows of queries and keys."""

from __future__ import annotations

import torch

from ostinato.formats.gguf.names import CONVOLUTIONS


def to_checkpoint_layout(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the checkpoint's form, from float32 in the file's shape.

    It is for tensors with `names.is_changed`: A becomes the logarithm of its negative, all numbers of heads and of the
    norm are put in one dimension, and the convolution gets its middle dimension.
    """
    if name.endswith(CONVOLUTIONS):
        return values.unsqueeze(1)
    return torch.log(-values).flatten() if name.endswith(".ssm_a") else values.flatten()


def to_half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head, [heads * size, in]: from pairs of neighbours to all firsts, then all seconds."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
