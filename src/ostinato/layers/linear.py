"""Linear layers: plain ones, several packed into one product, and the token embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ostinato.layers.build import Build, Target
from ostinato.layers.moe import Experts
from ostinato.layers.quantized import Matrix, QuantizedView
from ostinato.plan.quantization import Quantization


class Linear(Matrix):
    """y = (x W^T + b) * multiplier.

    `multiplier` is one number, or one for each output: [out] float32. `in_multiplier` multiplies x. With
    `keeps_dtype` the weight is never quantised.
    """

    def __init__(
        self,
        build: Build,
        in_size: int,
        out_size: int,
        bias: bool = False,
        multiplier: float | torch.Tensor = 1.0,
        in_multiplier: float = 1.0,
        keeps_dtype: bool = False,
    ) -> None:
        super().__init__(build.matrix(out_size, in_size))
        self.op = build.ops.linear
        self.keeps_dtype = keeps_dtype
        self.bias = build.weight(out_size) if bias else None
        # Without a bias a multiple of the input is one of the outputs, which costs nothing there.
        self.in_multiplier = in_multiplier if bias else 1.0
        self.scale = output_scale(build, out_size, multiplier if bias else multiplier * in_multiplier)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        """[tokens, in] -> [tokens, out], or half as many with the activation `swiglu`. `residual` is added last, and
        gives the result its dtype."""
        if self.in_multiplier != 1.0:
            x = x * self.in_multiplier
        out_dtype = residual.dtype if residual is not None and residual.dtype != x.dtype else None
        quantization = () if self.weight_scale is None else (self.weight_scale, self.group_size)
        return self.op(x, self.weight, self.bias, residual, activation, self.scale, out_dtype, *quantization)

    def checkpoint_names(self, path: str) -> tuple[str, ...]:
        """The checkpoint's names of the linears in a module that the model calls `path`."""
        return (path,)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}.weight", self.target()
        if self.bias is not None:
            yield f"{prefix}.bias", self.bias.data


def output_scale(build: Build, out_size: int, multiplier: float | torch.Tensor) -> torch.Tensor | None:
    """What `ops.linear` takes for a multiplier of its outputs: [out] float32, or None where that is 1 throughout."""
    if isinstance(multiplier, torch.Tensor):
        return multiplier
    return None if multiplier == 1.0 else torch.full((out_size,), multiplier, dtype=torch.float32, device=build.device)


class PackedLinear(Linear):
    """Linears of one input, stored as one matrix; each part keeps its own name in the checkpoint.

    An instance called `attn.qkv` with parts `q_proj`, `k_proj` holds the tensors `attn.q_proj.weight` and so on.
    """

    def __init__(
        self,
        build: Build,
        in_size: int,
        parts: Sequence[tuple[str, int]],
        bias: bool = False,
        multiplier: float | torch.Tensor = 1.0,
        in_multiplier: float = 1.0,
    ) -> None:
        super().__init__(build, in_size, sum(size for _, size in parts), bias, multiplier, in_multiplier)
        self.parts = tuple(parts)

    def part(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[tokens, in] -> [tokens, end - begin]: these outputs alone."""
        assert self.in_multiplier == 1.0, "a part takes its input as it is"
        bias, scale = (None if each is None else each[begin:end] for each in (self.bias, self.scale))
        quantization = () if self.weight_scale is None else (self.weight_scale[begin:end], self.group_size)
        return self.op(x, self.weight[begin:end], bias, None, None, scale, None, *quantization)

    def checkpoint_names(self, path: str) -> tuple[str, ...]:
        parent = path.rpartition(".")[0]
        return tuple(f"{parent}.{name}" if parent else name for name, _ in self.parts)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Target]]:
        target, begin = self.target(), 0
        for path, (_, size) in zip(self.checkpoint_names(prefix), self.parts, strict=True):
            end = begin + size
            yield f"{path}.weight", target.rows(begin, end) if isinstance(target, QuantizedView) else target[begin:end]
            if self.bias is not None:
                yield f"{path}.bias", self.bias.data[begin : begin + size]
            begin = end


class Embedding(Matrix):
    """Token embedding times `multiplier`; with tied embeddings its weight is the LM head's, and may be quantised."""

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, multiplier: float = 1.0) -> None:
        super().__init__(build.matrix(vocab_size, hidden_size))
        self.op = build.ops.embedding
        self.multiplier = multiplier
        self.dtype = build.dtype
        """Of its vectors."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]"""
        if self.weight_scale is None:
            return self.op(token_ids, self.weight, self.multiplier)
        return self.op(token_ids, self.weight, self.multiplier, self.weight_scale, self.group_size, self.dtype)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}.weight", self.target()


def place_matrices(model: nn.Module, build: Build, quantization: Quantization, tied_embeddings: bool) -> None:
    """Gives the deferred matrices of `model` their memory, quantised or in the model's dtype."""
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            is_covered = not module.keeps_dtype and quantization.covers(module.checkpoint_names(path))
            matrices: tuple[Matrix, ...] = (module,)
        elif isinstance(module, Experts):
            is_covered = quantization.covers(module.checkpoint_names(path), module.is_stack)
            matrices = (module.up, module.down)
        elif isinstance(module, Embedding):
            is_covered = tied_embeddings and quantization.covers(("lm_head",))
            matrices = (module,)
        else:
            continue
        for matrix in matrices:
            if is_covered:
                matrix.place_quantized(quantization.group_size, build.device)
            else:
                matrix.place(build.dtype, build.device)
