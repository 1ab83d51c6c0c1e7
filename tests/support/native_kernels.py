"""Calls of native kernels that check the promises of all of them, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.native_sets import native_kernel, record, threads


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def checked_kernel(isa: str, name: str, *, deterministic: bool = False) -> Callable[..., torch.Tensor]:
    """The kernel, which must give the same bits with 1 thread, with 2, and recorded, into a given output.

    All calls but one get copies of the arguments, in which what they write is compared.
    """
    kernel = native_kernel(isa, name, deterministic=deterministic)

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        alone, recorded = [_copy(arg) for arg in args], [_copy(arg) for arg in args]
        with threads(1):
            of_one = kernel(*alone, **kwargs)
        with threads(2):
            out = kernel(*args, **kwargs)
        into = torch.full_like(out, torch.nan if out.is_floating_point() else -1)
        record(isa, kernel, into, *recorded, **kwargs).run(len(out))
        assert same_bits(of_one, out), f"{name}: the bits depend on the number of threads"
        assert same_bits(into, out), f"{name}: a recorded call gives other bits"
        for given, *others in zip(args, alone, recorded, strict=True):
            if isinstance(given, torch.Tensor):
                assert all(same_bits(given, other) for other in others), f"{name}: what it writes differs"
        return out

    return call


def _copy(arg: Any) -> Any:
    """The values in a tensor of the same strides."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype).copy_(arg)


def same_bits(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all values are equal, NaN being equal to NaN."""
    return torch.equal(given.isnan(), expected.isnan()) and torch.equal(given.nan_to_num(1), expected.nan_to_num(1))


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of a value in `dtype` that was computed in float32."""
    return 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 + 1e-5


def spaced(t: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values, `gap` elements further apart in the first dimension; NaN lies in between."""
    size = t[:1].numel() if len(t) else t.flatten(1).shape[1]
    wide = torch.full((t.shape[0], size + gap), torch.nan, dtype=t.dtype)
    return wide[:, :size].copy_(t.flatten(1)).unflatten(1, t.shape[1:])
