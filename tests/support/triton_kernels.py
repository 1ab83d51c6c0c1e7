"""What tests of Triton kernels share: their tolerance, and calls of a kernel and of its reference on equal inputs.

Without a GPU the kernels run in Triton's interpreter, about 25 ms per program instance: sizes must be toys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ostinato.ops.dispatch import reference_kernel, triton_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: on a GPU, or in the interpreter."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2 * 2.0**-10, torch.bfloat16: 2 * 2.0**-7}
"""Of the largest magnitude of what is compared: float32 sums in another order, and one rounding more of 16 bits."""


def require_triton() -> None:
    """At the top of a test file: skips it where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: it is a test dependency on x86_64 Linux")


def run_both(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any, list[torch.Tensor], list[torch.Tensor]]:
    """Calls the Triton kernel and the reference of an operation on copies of the arguments.

    -> both results, and each one's tensors among the positional arguments as the call left them
    """
    given, expected = _copies(args, DEVICE), _copies(args, DEVICE)
    result = triton_kernel(name)(*given, **_named(kwargs))
    right = reference(name)(*expected, **_named(kwargs))
    return result, right, _tensors(given), _tensors(expected)


def reference(name: str) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = reference_kernel(name)
    return function


def check(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Both give the same, and leave the same in their arguments, NaN in the same places. -> the kernel's result"""
    result, right, given, expected = run_both(name, *args, **kwargs)
    assert_close(result, right)
    for own, other in zip(given, expected, strict=True):
        assert_close(own, other)
    return result


def assert_close(own: torch.Tensor, right: torch.Tensor, tolerance: float | None = None) -> None:
    """Within the dtype's tolerance of the largest magnitude in `right`."""
    assert (own.shape, own.dtype) == (right.shape, right.dtype)
    if not own.dtype.is_floating_point:
        assert torch.equal(own, right)
        return
    finite = right[right.isfinite()].float()
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    tolerance = TOLERANCE[own.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(own.float(), right.float(), rtol=0, atol=tolerance * max(scale, 1e-6), equal_nan=True)


def _copies(values: Any, device: torch.device) -> list[Any]:
    """Clones that keep strides: views with gaps stay so."""
    return [_copy(value, device) if isinstance(value, torch.Tensor) else value for value in values]


def _copy(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return whole.clone().to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def _named(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(each, DEVICE) if isinstance(each, torch.Tensor) else each for name, each in kwargs.items()}


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
