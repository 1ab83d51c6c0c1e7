"""Kernels that a model calls, as the plan chose them (native, Triton or reference), with one place that sees each call.

A native kernel is a function of the extension, called with its arguments by name: the number of tokens, the arguments
of its operation's reference, and `out`, the tensor that it writes. The number comes first, since a replay leaves out
padding at the end. The kernel's struct in C++ declares each argument's meaning and layout. A missing or unknown name is
a TypeError, another dtype or layout an AssertionError, before anything runs. C++ notes the addresses of tensors and
copies all else.
"""

from __future__ import annotations

import ast
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from ostinato.ops.arrays import Collectives, dtype_name, numpy_dtype, on_cache_line
from ostinato.ops.native_extension import NativeExtension
from ostinato.ops.operations import COLLECTIVE_OPS, OPERATIONS, Operations, Result
from ostinato.ops.step_inputs import Array
from ostinato.os_support import request_matrix_units, spin_turns

Kernel = Callable[..., "Array"]


class Recorder(Protocol):
    """Recorder of a model's calls, so that they can be repeated without the model's Python."""

    def kernel(self, name: str, kernel: Kernel, args: tuple[object, ...], kwargs: dict[str, object]) -> Array:
        """Call a kernel and record the call."""

    def split(self, name: str, function: Kernel, tensors: tuple[Array, ...], others: tuple[object, ...]) -> Array:
        """Call a part of a layer; record it as one call if parts of that name are left out of the graph."""


class CallHook:
    """Connection of one model's kernels to a recorder. It records nothing while `recorder` is None."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def wrap(self, name: str, kernel: Kernel) -> Kernel:
        """Return a function that calls `kernel` through the recorder."""

        def call(*args: object, **kwargs: object) -> Array:
            if self.recorder is None:
                return kernel(*args, **kwargs)
            return self.recorder.kernel(name, kernel, args, kwargs)

        return call

    def split(self, name: str, function: Kernel, tensors: tuple[Array, ...], *others: object) -> Array:
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
        parameters: Mapping[str, object],
        result: Result,
        options: Mapping[str, object],
        threads: int = 0,
    ) -> None:
        """Make the kernel `name` of `extension` callable.

        `parameters` are those of its operation (`operation_parameters`), `result` is the rule for the array that the
        kernel writes (`ops/operations.py`), and `options` are arguments passed in each call. It runs on `threads`
        threads; with 0 on as many as torch's in a process that has imported torch, else on one per core.
        """
        self.extension = extension
        self.threads = threads
        self.name = name
        self._run = getattr(extension, name)
        self._result = result
        self._names = tuple(parameters)
        self._given = {name: default for name, default in parameters.items() if default is not REQUIRED}
        self._given |= options

    def __call__(self, *args: object, out: Array | None = None, **kwargs: object) -> Array:
        tokens, arguments = self.prepare_call(out, args, kwargs)
        self._run(tokens, arguments, self.threads)
        written: Array = arguments["out"]
        return written

    def empty_result(self, *args: object, **kwargs: object) -> Array:
        """Return zeros in the shape and dtype of a call's result, or the argument that the kernel writes in place.

        It runs nothing. The calls that follow can read zeros, also as indices.
        """
        return self._result_array("zeros", args, kwargs)

    def prepare_call(
        self, out: Array | None, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[int, dict[str, Any]]:
        """Return a call's number of tokens and arguments by name.

        They fit the extension's function of the kernel's name, and the method of a `Program` that records the call.
        Without `out`, the kernel writes a new tensor, or the argument that is the result.
        """
        arguments: dict[str, Any] = self._given | dict(zip(self._names, args, strict=False)) | kwargs
        arguments["out"] = self._result_array("empty", args, kwargs) if out is None else out
        tokens: int = arguments[self._names[0]].shape[0]
        return tokens, arguments

    def _result_array(self, maker: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Array:
        """Return the argument that is the result, or a new array of the first argument's kind (`empty` or `zeros`)."""
        result = self._result(*args, **kwargs)
        if not isinstance(result, tuple):
            return cast("Array", result)
        shape, dtype = result
        first = args[0] if args else kwargs[self._names[0]]
        if isinstance(first, np.ndarray):
            kind = numpy_dtype(dtype) if isinstance(dtype, str) else cast(np.dtype, dtype)
            if maker == "empty" and math.prod(shape) * kind.itemsize >= ALIGNED_BYTES:
                return cast("Array", on_cache_line(shape, kind))
            return cast("Array", getattr(np, maker)(shape, kind))
        torch = sys.modules["torch"]
        return cast("Array", getattr(torch, maker)(shape, dtype=getattr(torch, dtype_name(dtype))))


ALIGNED_BYTES = 2**14
"""Bytes from which on a kernel's result begins at a cache line; for smaller ones that takes longer than it saves."""

REQUIRED = object()
"""Default of a parameter that has none."""


@cache
def operation_parameters(name: str) -> Mapping[str, object]:
    """Return the parameters of an operation, in order, with their defaults; `REQUIRED` for one without.

    They are read from the source of the operation's reference, which is not imported: it imports torch.
    """
    spec = find_spec(f"ostinato.ops.reference.{OPERATIONS[name].file}")
    assert spec is not None, "an operation has a reference"
    definitions = _definitions(str(spec.origin))
    arguments = definitions[name].args
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = [REQUIRED] * (len(named) - len(arguments.defaults)) + [ast.literal_eval(d) for d in arguments.defaults]
    found = dict(zip((each.arg for each in named), defaults, strict=True))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[each.arg] = REQUIRED if default is None else ast.literal_eval(default)
    return found


@cache
def _definitions(source: str) -> Mapping[str, ast.FunctionDef]:
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    return {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}


class Ops(Operations):
    """Chosen implementation of every operation. The file of an operation's name documents its function.

    A recorder listens at `hook`. Parts of a layer that depend on a step's rows go through its `split`.
    """

    def __init__(self, kernels: Mapping[str, Kernel], hook: CallHook) -> None:
        vars(self).update(kernels)
        self.hook = hook


def select_ops(
    choices: Mapping[str, str],
    isa: str | None = None,
    *,
    deterministic: bool = False,
    ranks: Collectives | None = None,
    threads: int = 0,
) -> Ops:
    """Return the kernels that the plan chose.

    `choices` maps an operation's name to `reference`, `native` or `triton`. An operation without an entry, which the
    model does not use, is its reference, unless all others are native: then there may be no torch. `isa` is the
    instruction set of the extension with the native kernels. With `deterministic`, all kernels are native except those
    between `ranks`. `ranks` are those that share the model; None for one rank. `threads` is that of `NativeKernel`.
    """
    extension = load_extension(isa) if isa is not None else None
    is_native = all(choice == "native" for choice in choices.values()) and bool(choices)
    hook = CallHook()

    def between(name: str) -> Kernel:
        assert ranks is not None, "several share the model"
        if name != "sharded_rms_norm" or not deterministic:
            return partial(reference_kernel(name), ranks=ranks)
        from ostinato.ops.reference.collectives import rms_norm_gathered  # it imports torch

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
        return reference_kernel(name) if name in choices or not is_native else partial(_not_planned, name)

    return Ops({name: hook.wrap(name, make_kernel(name)) for name in OPERATIONS}, hook)


def _not_planned(name: str, *_: object, **__: object) -> Array:
    raise AssertionError(f"{name} is called, and the plan has not seen it in the model")


def native_kernel(
    extension: NativeExtension, name: str, *, deterministic: bool = False, threads: int = 0
) -> NativeKernel:
    """Return the operation's kernel in `extension`, which is called like its reference."""
    row = OPERATIONS[name]
    assert row.native is not None, f"{name} has no native kernel"
    options = dict.fromkeys(row.native.deterministic, deterministic)
    return NativeKernel(extension, name, operation_parameters(name), row.result, options, threads)


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
