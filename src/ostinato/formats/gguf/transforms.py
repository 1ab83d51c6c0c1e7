"""What a checkpoint holds in another form than a GGUF file: values of state layers, and rows of queries and keys."""

from __future__ import annotations

import torch

from ostinato.formats.gguf.names import CONVOLUTIONS


def restored(name: str, values: torch.Tensor) -> torch.Tensor:
    """A tensor for which `names.is_changed`, float32 in the file's shape, as a checkpoint has it: A as the logarithm of
    its negative, all numbers of heads and of the norm in one dimension, and the convolution with its middle one."""
    if name.endswith(CONVOLUTIONS):
        return values.unsqueeze(1)
    return torch.log(-values).flatten() if name.endswith(".ssm_a") else values.flatten()


def half_apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * size, in], in each head pairs of neighbours -> the first of each pair, then the second ones."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
