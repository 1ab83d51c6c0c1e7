"""The native kernels that this machine can run: all tests of one run once per instruction set that is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ostinato.ops import dispatch
from ostinato.ops.dispatch import NativeKernel, load_extension
from ostinato.ops.ukernels import ROWS
from ostinato.plan.device.detect import detect
from ostinato.plan.device.kernel_support import CPU_FLAGS, features, installed_modules, runnable_here

CHOSEN = {isa for isas in CPU_FLAGS.values() for isa in isas}


def uses_tiles(isa: str) -> bool:
    """Whether its products run on matrix units, or on what stands in for them."""
    return isa not in CHOSEN or "amx" in features(isa)


def has_driver(isa: str, driver: str) -> bool:
    """Whether the table of micro-kernels has a row with this driver for the module."""
    return any(row.driver == driver and row.runs_on(features(isa)) for row in ROWS)


def last_m(name: str) -> int:
    """The largest m that all rows of this name take."""
    return min(row.max_m for row in ROWS if row.name == name and row.max_m is not None)


def first_m(name: str) -> int:
    """The smallest m that all rows of this name take."""
    return max(row.min_m for row in ROWS if row.name == name)


def _parameters(built: list[str], lacking: str) -> list[Any]:
    return [pytest.param(isa, id=isa) for isa in built] or [
        pytest.param("", id="none", marks=pytest.mark.skip(reason=lacking))
    ]


_BUILT = [isa for isa in runnable_here() if isa in installed_modules()]


def runnable_sets() -> list[str]:
    """Instruction sets that are built and that this CPU has."""
    return [isa for isa in _BUILT if isa in CHOSEN]


SETS = _parameters(runnable_sets(), "no native module is built: run make native")
"""Those of `runnable_sets`."""

PRODUCT_SETS = _parameters(_BUILT, "no native module is built: run make native")
"""The same, and what stands in for one that this CPU lacks: it has the kernels of matrix products."""

TILED_SETS = _parameters(
    [isa for isa in _BUILT if uses_tiles(isa)],
    "no module with matrix units is built, nor what stands in for one: make native builds that for a CPU with AVX-512",
)
"""Those that multiply on matrix units, or on what stands in for them."""

INTEGER_SETS = _parameters(
    [isa for isa in _BUILT if has_driver(isa, "GEMV_I16")], "no module is built that multiplies in 16-bit integers"
)
"""Those of PRODUCT_SETS in which tokens of bfloat16 and float16 become integers for weights of 4 to 8 bits."""

INT8_SETS = _parameters(
    [isa for isa in _BUILT if has_driver(isa, "INT8_AMX") or has_driver(isa, "INT8_VNNI")],
    "no module is built that multiplies tokens in 8-bit integers",
)
"""Those of PRODUCT_SETS whose linears take tokens in int8."""


def native_kernel(isa: str, name: str, *, deterministic: bool = False) -> NativeKernel:
    return dispatch.native_kernel(load_extension(isa), name, deterministic=deterministic)


def record(isa: str, kernel: NativeKernel, out: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """A program of one call, to be run for any number of tokens."""
    program = load_extension(isa).Program()
    getattr(program, kernel.name)(*kernel.prepare_call(out, args, kwargs))
    return program


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def skip_unless_planned(kernels: str) -> None:
    """Skips a test of engines with native kernels where the plan has none: none is built, or the run does without."""
    facts = detect("cpu").native
    if kernels == "native" and facts.isa is None:
        pytest.skip(facts.reason)
