"""Native kernels: functions of the extension, called with their arguments by name.

An operation's file lowers a call: `lower(*args, out) -> (tokens, arguments)`, where `out` is the tensor that the kernel
writes. `tokens` comes first, since a replay leaves padding at the end out. `arguments` has a value for each field of
the kernel's struct in C++: a missing or unknown name is a TypeError. C++ notes where tensors lie and copies all else.

Calling the kernel makes the call, into an output made by the rule in the operation's row (`ops/facts.py`). A tape keeps
the call (`lowered`) and makes it again without Python.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ostinato.ops.facts import Result

Lowered = tuple[int, dict[str, Any]]


def load_extension(isa: str) -> Any:
    """The module of kernels for an instruction set. torch, imported above, brings the OpenMP runtime that both use."""
    return importlib.import_module(f"ostinato._native_{isa}")


class NativeKernel:
    """A kernel of the extension, to be called like its reference."""

    def __init__(
        self, extension: Any, name: str, lower: Callable[..., Lowered], result: Result, told: Mapping[str, Any]
    ) -> None:
        """`result` is the rule for what the kernel writes, `told` what `lower` gets in each call."""
        self.extension = extension
        self.name = name
        self._run = getattr(extension, name)
        self._lower = partial(lower, **told) if told else lower
        self._result = result

    def __call__(self, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if out is None:
            out = self._output(args, kwargs)
        self._run(*self._lower(*args, **kwargs, out=out))
        return out

    def lowered(self, out: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The call, for the method of a `Program` that has the kernel's name and notes it. `out` is None
        where the result is an argument."""
        return self._lower(*args, **kwargs, out=self._output(args, kwargs) if out is None else out)

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """What the kernel writes: a new tensor, or the argument that is the result."""
        result = self._result(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result
        shape, dtype = result
        return torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def check_rows(name: str, *tensors: torch.Tensor) -> None:
    """The last dimension of what a kernel reads must be contiguous; a mistake in a layer, not in what a user asked."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{name}: the last dimension is not contiguous"


def check_heads(name: str, *tensors: torch.Tensor) -> None:
    """[tokens, heads, head_dim] that a kernel reads may be strided by token only; else as `check_rows`."""
    check_rows(name, *tensors)
    for tensor in tensors:
        heads, size = tensor.shape[1:]
        assert heads <= 1 or tensor.stride(1) == size, f"{name}: the heads of a token are not contiguous"


def check_plain(name: str, dtype: torch.dtype, *tensors: torch.Tensor | None) -> None:
    """What a kernel reads as an array of `dtype` without strides, where it is given."""
    for tensor in tensors:
        if tensor is not None:
            assert tensor.dtype == dtype, f"{name}: {tensor.dtype} where {dtype} is read"
            assert tensor.is_contiguous(), f"{name}: a strided tensor where a contiguous one is read"


def rows_of(
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]],
) -> dict[str, Any]:
    """A step's rows as `StepRows` of rows.h takes them. They are read when the kernel runs; checkpoints are copied."""
    slots = (row_starts, read_slots, write_slots)
    check_rows("rows", *slots)
    assert all(t.dtype == torch.int32 for t in slots), "rows: in int32"
    return {
        "row_starts": row_starts,
        "read_slots": read_slots,
        "write_slots": write_slots,
        "num_decode_rows": num_decode_rows,
        "checkpoints": checkpoints,
    }
