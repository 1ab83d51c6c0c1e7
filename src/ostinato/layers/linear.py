"""Linear layers: plain ones, several packed into one product, and the token embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.layers.build import Build


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, build: Build, in_size: int, out_size: int, bias: bool = False) -> None:
        super().__init__()
        self.op = build.ops.linear
        self.weight = build.weight(out_size, in_size)
        self.bias = build.weight(out_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out]"""
        return self.op(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Linears of one input, stored as one matrix; each part keeps its own name in the checkpoint.

    An instance called `attn.qkv` with parts `q_proj`, `k_proj` holds the tensors `attn.q_proj.weight` and so on.
    """

    def __init__(self, build: Build, in_size: int, parts: Sequence[tuple[str, int]], bias: bool = False) -> None:
        super().__init__(build, in_size, sum(size for _, size in parts), bias)
        self.parts = tuple(parts)

    def part(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[tokens, in] -> [tokens, end - begin]: these outputs alone."""
        return self.op(x, self.weight[begin:end], None if self.bias is None else self.bias[begin:end])

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        parent = prefix.rpartition(".")[0]
        begin = 0
        for name, size in self.parts:
            path = f"{parent}.{name}" if parent else name
            yield f"{path}.weight", self.weight.data[begin : begin + size]
            if self.bias is not None:
                yield f"{path}.bias", self.bias.data[begin : begin + size]
            begin += size


class Embedding(nn.Module):
    """Token embedding; with tied embeddings its weight is the LM head's too."""

    def __init__(self, build: Build, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = build.weight(vocab_size, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]"""
        return F.embedding(token_ids, self.weight)
