"""Kernels that a model calls, as the plan chose them (native, Triton or reference), with one place that sees each call.

A native kernel is a function of the extension, called with its arguments by name: the number of tokens, the arguments
of its operation's reference, and `out`, the tensor that it writes. The number comes first, since a replay leaves out
padding at the end. The kernel's struct in C++ declares each argument's meaning and layout. A missing or unknown name is
a TypeError, another dtype or layout an AssertionError, before anything runs. C++ notes the addresses of tensors and
copies all else.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch

from ostinato.ops.native_extension import NativeExtension
from ostinato.ops.operations import COLLECTIVE_OPS, OPERATIONS, Operations, Result
from ostinato.ops.reference.collectives import Collectives, rms_norm_gathered
from ostinato.os_support import request_matrix_units, spin_turns

Kernel = Callable[..., torch.Tensor]


class Recorder(Protocol):
    """Recorder of a model's calls, so that they can be repeated without the model's Python."""

    def kernel(self, name: str, kernel: Kernel, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
        """Call a kernel and record the call."""
        ...

    def split(
        self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], others: tuple[object, ...]
    ) -> torch.Tensor:
        """Call a part of a layer; record it as one call if parts of that name are left out of the graph."""
        ...


class CallHook:
    """Connection of one model's kernels to a recorder. It records nothing while `recorder` is None."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def wrap(self, name: str, kernel: Kernel) -> Kernel:
        """Return a function that calls `kernel` through the recorder."""

        def call(*args: object, **kwargs: object) -> torch.Tensor:
            if self.recorder is None:
                return kernel(*args, **kwargs)
            return self.recorder.kernel(name, kernel, args, kwargs)

        return call

    def split(self, name: str, function: Kernel, tensors: tuple[torch.Tensor, ...], *others: object) -> torch.Tensor:
        """Call `function(*tensors, *others)`, a part that piecewise graphs may leave out.

        The part is `attention` or `state`, whose work depends on the rows of a step, or `moe`, whose kernel may not be
        capturable. `tensors` and the result have one entry per token in their first dimension; `others` are the step
        and objects that belong to the layer.
        """
        if self.recorder is None:
            return function(*tensors, *others)
        return self.recorder.split(name, function, tensors, others)


class NativeKernel:
    """A kernel of the extension, called like its reference."""

    def __init__(
        self,
        extension: NativeExtension,
        name: str,
        reference: Callable[..., torch.Tensor],
        result: Result,
        options: Mapping[str, object],
        threads: int = 0,
    ) -> None:
        """Make the kernel `name` of `extension` callable.

        `result` is the rule for the tensor that the kernel writes (`ops/operations.py`); `options` are arguments passed
        in each call. It runs on `threads` threads, or with 0 on as many as torch's.
        """
        self.extension = extension
        self.threads = threads
        self.name = name
        self._run = getattr(extension, name)
        self._result = result
        parameters = inspect.signature(reference).parameters
        self._names = tuple(parameters)
        self._given = {each.name: each.default for each in parameters.values() if each.default is not each.empty}
        self._given |= options

    def __call__(self, *args: object, out: torch.Tensor | None = None, **kwargs: object) -> torch.Tensor:
        tokens, arguments = self.prepare_call(out, args, kwargs)
        self._run(tokens, arguments, self.threads)
        written: torch.Tensor = arguments["out"]
        return written

    def empty_result(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Return zeros in the shape and dtype of a call's result, or the argument that the kernel writes in place.

        It runs nothing. The calls that follow can read zeros, also as indices.
        """
        return self._result_tensor(torch.zeros, args, kwargs)

    def prepare_call(
        self, out: torch.Tensor | None, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[int, dict[str, Any]]:
        """Return a call's number of tokens and arguments by name.

        They fit the extension's function of the kernel's name, and the method of a `Program` that records the call.
        Without `out`, the kernel writes a new tensor, or the argument that is the result.
        """
        arguments = self._given | dict(zip(self._names, args, strict=False)) | kwargs
        arguments["out"] = self._result_tensor(torch.empty, args, kwargs) if out is None else out
        return arguments[self._names[0]].shape[0], arguments

    def _result_tensor(
        self, make: Callable[..., torch.Tensor], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> torch.Tensor:
        """Return the argument that is the result, or a new tensor created by `make`."""
        result = self._result(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result
        assert isinstance(result, tuple), "the result is an argument, or a shape and a dtype"
        shape, dtype = result
        return make(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)


class Ops(Operations):
    """Chosen implementation of every operation. The file of an operation's name documents its function.

    A recorder listens at `tap`. Parts of a layer that depend on a step's rows go through its `split`.
    """

    def __init__(self, kernels: Mapping[str, Kernel], tap: CallHook) -> None:
        vars(self).update(kernels)
        self.tap = tap


def select_ops(
    choices: Mapping[str, str],
    isa: str | None = None,
    *,
    deterministic: bool = False,
    ranks: Collectives | None = None,
    threads: int = 0,
) -> Ops:
    """Return the kernels that the plan chose.

    `choices` maps an operation's name to `reference`, `native` or `triton`. An operation without an entry (the model
    does not use it) is its reference. `isa` is the instruction set of the extension with the native kernels. With
    `deterministic`, all kernels are native except those between `ranks`. `ranks` are those that share the model; None
    for one rank. Native kernels run on `threads` threads, or with 0 on as many as torch's.
    """
    extension = load_extension(isa) if isa is not None else None
    tap = CallHook()

    def between(name: str) -> Kernel:
        assert ranks is not None, "several share the model"
        if name != "sharded_rms_norm" or not deterministic:
            return partial(reference_kernel(name), ranks=ranks)
        assert extension is not None, "a deterministic plan has native kernels"
        return partial(
            rms_norm_gathered,
            ranks=ranks,
            rms_norm=native_kernel(extension, "rms_norm", deterministic=True, threads=threads),
            gated_rms_norm=native_kernel(extension, "gated_rms_norm", deterministic=True, threads=threads),
        )

    def make_kernel(name: str) -> Kernel:
        if ranks is not None and name in COLLECTIVE_OPS:
            return between(name)
        if choices.get(name) == "native":
            assert extension is not None, "native kernels are chosen for an instruction set"
            return native_kernel(extension, name, deterministic=deterministic, threads=threads)
        if choices.get(name) == "triton":
            return triton_kernel(name)
        assert name not in choices or not deterministic, "references do not keep the order of their sums"
        return reference_kernel(name)

    return Ops({name: tap.wrap(name, make_kernel(name)) for name in OPERATIONS}, tap)


def native_kernel(
    extension: NativeExtension, name: str, *, deterministic: bool = False, threads: int = 0
) -> NativeKernel:
    """Return the operation's kernel in `extension`, which is called like its reference."""
    row = OPERATIONS[name]
    assert row.native is not None, f"{name} has no native kernel"
    options = dict.fromkeys(row.native.deterministic, deterministic)
    return NativeKernel(extension, name, reference_kernel(name), row.result, options, threads)


def triton_kernel(name: str) -> Kernel:
    """Return the operation's Triton kernel, which takes what its reference takes.

    The file is imported here: if no Triton kernel is chosen, Triton need not be installed.
    """
    row = OPERATIONS[name]
    assert row.triton is not None, f"{name} has no Triton kernel"
    return _function(f"ostinato.ops.triton.{row.triton_file or row.file}", name)


def reference_kernel(name: str) -> Kernel:
    """Return the operation's definition in torch."""
    return _function(f"ostinato.ops.reference.{OPERATIONS[name].file}", name)


def _function(module: str, name: str) -> Kernel:
    function: Kernel = getattr(importlib.import_module(module), name)
    return function


def load_extension(isa: str) -> NativeExtension:
    """Import and return the module of kernels for an instruction set.

    Its threads wait as the environment says, if it does. ImportError if the module uses matrix units, which each
    process must request, and the operating system refuses them.
    """
    extension = cast(NativeExtension, importlib.import_module(f"ostinato._native_{isa}"))
    if extension.tiles == "amx" and (refusal := request_matrix_units()) is not None:
        raise ImportError(f"{isa} needs matrix units, which the operating system refuses ({refusal})")
    extension.set_spin_turns(spin_turns(os.environ))
    return extension
