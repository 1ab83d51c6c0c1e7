"""The chosen kernels: one place decides what runs, and one place sees every call, where a recorder can note it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ostinato.ops.facts import OPERATIONS, Operations
from ostinato.ops.native import NativeKernel, load_extension
from ostinato.ops.recording import Kernel, Tap


class Ops(Operations):
    """The chosen implementation of every operation. The file of an operation's name documents its function.

    `tap` is where a recorder listens; parts of a layer that depend on which rows a step has go through its `split`.
    """

    def __init__(self, kernels: Mapping[str, Kernel], tap: Tap) -> None:
        vars(self).update(kernels)
        self.tap = tap


def select_ops(choices: Mapping[str, str], isa: str | None = None, *, deterministic: bool = False) -> Ops:
    """The kernels that the plan chose: `choices` maps an operation's name to `reference` or `native`.

    An operation that is not named (the model does not use it) is its reference. `isa` is the instruction set of the
    extension that has the native ones; if `deterministic`, all are native.
    """
    extension = load_extension(isa) if isa is not None else None
    tap = Tap()

    def made(name: str) -> Kernel:
        if choices.get(name) == "native":
            assert extension is not None, "native kernels are chosen for an instruction set"
            return native_kernel(extension, name, deterministic=deterministic)
        assert name not in choices or not deterministic, "references do not keep the order of their sums"
        reference: Kernel = module_of(name).reference
        return reference

    return Ops({name: tap.wrap(name, made(name)) for name in OPERATIONS}, tap)


def native_kernel(extension: Any, name: str, *, deterministic: bool = False) -> NativeKernel:
    """The operation's kernel in `extension`, called like its reference."""
    row = OPERATIONS[name]
    assert row.native is not None, f"{name} has no native kernel"
    options = dict.fromkeys(row.native.deterministic, deterministic)
    return NativeKernel(extension, name, module_of(name).reference, row.result, options)


def module_of(name: str) -> Any:
    """The operation's file, with its `reference`."""
    folder = "ostinato.ops.encoder" if OPERATIONS[name].caller == "encoder" else "ostinato.ops"
    return import_module(f"{folder}.{name}")
