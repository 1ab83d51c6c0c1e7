"""What tests of native kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ostinato.ops import NATIVE
from ostinato.ops.native import NativeKernel, load_extension
from ostinato.plan.native import NativeFacts


def native_kernel(facts: NativeFacts, name: str) -> Callable[..., torch.Tensor]:
    """The extension's kernel, called with 2 threads, after calls with 1 and 2 gave the same bits.

    Tensors among the arguments are copied for the first call, so that what it writes into them is not seen.
    """

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        kernel = NativeKernel(load_extension(facts.isa or ""), name, NATIVE[name])
        copies = [_copy(arg) for arg in args]
        with given_threads(1):
            alone = kernel(*copies, **kwargs)
        with given_threads(2):
            out = kernel(*args, **kwargs)
        assert same_bits(out, alone), f"{name}: the bits depend on the number of threads"
        for arg, copy in zip(args, copies, strict=True):
            if isinstance(arg, torch.Tensor):
                assert same_bits(arg, copy), f"{name}: what it writes depends on the number of threads"
        return out

    return call


def _copy(arg: Any) -> Any:
    """The values in a tensor of the same strides."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype).copy_(arg)


@contextmanager
def given_threads(count: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def same_bits(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all values are equal, NaN being equal to NaN."""
    return torch.equal(given.isnan(), expected.isnan()) and torch.equal(given.nan_to_num(1), expected.nan_to_num(1))


def spaced(t: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values, `gap` elements further apart in the first dimension; NaN lies in between."""
    wide = torch.full((t.shape[0], t[0].numel() + gap), torch.nan, dtype=t.dtype)
    return wide[:, : t[0].numel()].copy_(t.flatten(1)).unflatten(1, t.shape[1:])
