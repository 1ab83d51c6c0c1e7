"""Native kernels: functions of the extension, called with their arguments by name.

A kernel takes the number of tokens, the arguments of its operation's reference, and `out`, the tensor that it writes.
The number comes first, since a replay leaves padding at the end out. The kernel's struct in C++ says what each argument
is and how it must lie: a missing or unknown name is a TypeError, another dtype or layout an AssertionError, before
anything runs. C++ notes where tensors lie and copies all else.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ostinato.ops.facts import Result


def load_extension(isa: str) -> Any:
    """The module of kernels for an instruction set. torch, imported above, brings the OpenMP runtime that both use."""
    return importlib.import_module(f"ostinato._native_{isa}")


class NativeKernel:
    """A kernel of the extension, to be called like its reference."""

    def __init__(
        self,
        extension: Any,
        name: str,
        reference: Callable[..., torch.Tensor],
        result: Result,
        options: Mapping[str, Any],
    ) -> None:
        """`result` is the rule for what the kernel writes (`ops/facts.py`), `options` what it gets in each call."""
        self.extension = extension
        self.name = name
        self._run = getattr(extension, name)
        self._result = result
        parameters = inspect.signature(reference).parameters
        self._names = tuple(parameters)
        self._given = {each.name: each.default for each in parameters.values() if each.default is not each.empty}
        self._given |= options

    def __call__(self, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        tokens, arguments = self.lowered(out, args, kwargs)
        self._run(tokens, arguments)
        written: torch.Tensor = arguments["out"]
        return written

    def lowered(
        self, out: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """The call, for the extension's function of the kernel's name, or for the method of a `Program`, which notes
        it. Without `out`, the kernel writes a new tensor, or the argument that is the result."""
        arguments = self._given | dict(zip(self._names, args, strict=False)) | kwargs
        if out is None:
            out = self._result(*args, **kwargs)
            if not isinstance(out, torch.Tensor):
                shape, dtype = out
                out = torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        arguments["out"] = out
        return arguments[self._names[0]].shape[0], arguments
