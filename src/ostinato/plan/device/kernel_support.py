"""Choice of native kernels for this CPU, and detection of whether Triton kernels run on a device.

Nothing is imported: a native module for another CPU may not even load, and Triton takes a second.
"""

from __future__ import annotations

import platform
import shutil
import sysconfig
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from ostinato.files import exists, is_file
from ostinato.os_support import request_matrix_units
from ostinato.plan.device.isa_table import MATRIX_UNITS, TABLE, Feature
from ostinato.plan.device.linux import read_cpu_flags

CPU_FLAGS: dict[str, dict[str, frozenset[str]]] = {
    machine: {isa.name: isa.cpu_flags for isa in isas if not isa.is_stand_in} for machine, isas in TABLE.items()
}
"""Machine -> the instruction sets that the plan may choose, worst first, and the flags that a CPU must have."""

TEST_ISAS: dict[str, dict[str, frozenset[str]]] = {
    machine: {isa.name: isa.cpu_flags for isa in isas if isa.is_stand_in} for machine, isas in TABLE.items()
}
"""Machine -> the instruction sets that exist for tests only."""

HOW_TO_GET = (
    "install a C++17 compiler and Python's headers (Debian, Ubuntu: apt install g++ python3-dev), then "
    "Ostinato again (make native in a checkout, else pip install --force-reinstall --no-deps ostinato)"
)


@dataclass(frozen=True)
class NativeFacts:
    """Choice of native kernels.

    `isa` names the module `ostinato._native_<isa>` to use, None if there is none; `reason` says why it is this one, or
    what is missing and how to get it. `matrix_units` is `granted`, or the reason why the operating system refuses those
    that the CPU has; None if it has none.
    """

    isa: str | None
    reason: str
    matrix_units: str | None = None


NOT_THIS_CPU = NativeFacts(None, "native kernels are for the CPU of this machine alone")
"""Facts for a GPU, or for a device that is only described."""

GRANTED = "granted"


def detect_native(root: Path = Path("/"), request: Callable[[], str | None] = request_matrix_units) -> NativeFacts:
    """Return the native kernels of this process's package, on the CPU that `root`/proc describes.

    `request` asks for matrix units if the CPU has any, and returns why it may not use them.
    """
    flags = read_cpu_flags(root)
    return choose_isa(installed_modules(), flags, platform.machine(), ask_for_matrix_units(flags, request))


def ask_for_matrix_units(
    cpu_flags: Collection[str], request: Callable[[], str | None] = request_matrix_units
) -> str | None:
    """Return `NativeFacts.matrix_units` of a CPU with `cpu_flags`."""
    return (request() or GRANTED) if MATRIX_UNITS.issubset(cpu_flags) else None


def features(isa: str) -> frozenset[Feature]:
    """Return the features of an instruction set; none if it is unknown."""
    return next((row.features for isas in TABLE.values() for row in isas if row.name == isa), frozenset())


PACKAGE = Path(__file__).parents[2]


def module_file(isa: str, package: Path = PACKAGE) -> Path | None:
    """Return the file of an instruction set's kernels that fits this interpreter, if there is one."""
    paths = (package / f"_native_{isa}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if is_file(path)), None)


def installed_modules(package: Path = PACKAGE) -> frozenset[str]:
    """Return the instruction sets whose modules are in the package's folder and fit this interpreter."""
    known = (isa.name for isas in TABLE.values() for isa in isas)
    return frozenset(isa for isa in known if module_file(isa, package) is not None)


def worst_first(machine: str, cpu_flags: Collection[str]) -> dict[str, frozenset[str]]:
    """Return `CPU_FLAGS` of a machine, in the order of a CPU with `cpu_flags`: it may be slow at some instructions."""
    names = [*CPU_FLAGS.get(machine, ())]
    for row in TABLE.get(machine, ()):
        if row.slow_on is not None and row.slow_on.issubset(cpu_flags):
            place = names.index(row.name)
            names.insert(place - 1, names.pop(place))
    return {name: CPU_FLAGS[machine][name] for name in names}


def choose_isa(
    installed: Collection[str], cpu_flags: Collection[str], machine: str, matrix_units: str | None = None
) -> NativeFacts:
    """Return the best of the installed instruction sets that a CPU with `cpu_flags` runs.

    `machine` is that of `platform.machine`, `matrix_units` that of `NativeFacts`.
    """
    isas = worst_first(machine, cpu_flags)
    if not isas:
        return NativeFacts(None, f"native kernels exist for {' and '.join(CPU_FLAGS)}, and this machine is {machine}")
    usable_flags = frozenset(cpu_flags)
    unless = ""
    if usable_flags >= MATRIX_UNITS and matrix_units != GRANTED:
        usable_flags -= MATRIX_UNITS
        unless = f" without its matrix units, which the operating system refuses ({matrix_units})"
    isa, reason = _best(installed, isas, usable_flags, unless)
    return NativeFacts(isa, reason, matrix_units)


def _best(
    installed: Collection[str], isas: dict[str, frozenset[str]], cpu_flags: frozenset[str], refused_units: str
) -> tuple[str | None, str]:
    """Return the best of `isas` that is installed and runs, and why.

    `refused_units` is a clause about what the CPU has and cannot use.
    """
    lacking = {isa: sorted(needed - cpu_flags) for isa, needed in isas.items()}
    runnable = [isa for isa in isas if not lacking[isa]]
    if not runnable:
        worst = next(iter(isas))
        return None, f"native kernels need {worst} at least, and this CPU lacks {', '.join(lacking[worst])}"
    best = runnable[-1]
    if best in installed:
        return best, f"{best} is the best that this CPU runs{refused_units}"
    usable = [isa for isa in runnable if isa in installed]
    if usable:
        return usable[-1], f"{usable[-1]} is installed; {best} would be better{refused_units}: {HOW_TO_GET}"
    others = [isa for isa in isas if isa in installed]
    if not others:
        return None, f"no native kernels are installed: {HOW_TO_GET}"
    missing = ", ".join(lacking[others[0]])
    return None, (
        f"native kernels are installed for {', '.join(others)}, and this CPU lacks {missing}{refused_units}: "
        f"{HOW_TO_GET}"
    )


def runnable_here() -> list[str]:
    """Return the instruction sets that this machine runs, worst first, installed or not; stand-ins come last."""
    flags, machine = read_cpu_flags(), platform.machine()
    granted = ask_for_matrix_units(flags)
    chosen = [isa for isa in worst_first(machine, flags) if choose_isa([isa], flags, machine, granted).isa == isa]
    return chosen + [isa for isa, needed in TEST_ISAS.get(machine, {}).items() if needed <= flags]


MIN_CAPABILITY = 80
"""The first compute capability with bfloat16."""

MIN_VERSION = (3, 5)


@dataclass(frozen=True)
class TritonFacts:
    """Availability of Triton kernels. `reason` says why they run, or what is missing and how to get it."""

    is_usable: bool
    reason: str


FOR_GPUS = TritonFacts(False, "Triton kernels are for NVIDIA GPUs")
"""Facts for a CPU."""

BROUGHT_BY_TORCH = TritonFacts(True, "torch for CUDA brings Triton")
"""Facts for a GPU that need not be present."""


def detect_triton(capability: int | None, environ: Mapping[str, str]) -> TritonFacts:
    """Return whether Triton runs on a GPU of this machine: what is installed, and whether the GPU is new enough."""
    if capability is not None and capability < MIN_CAPABILITY:
        return TritonFacts(
            False, f"Triton kernels need compute capability 8.0, and this GPU has {capability // 10}.{capability % 10}"
        )
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return TritonFacts(False, "Triton is not installed: pip install triton")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return TritonFacts(False, f"Triton {version} is installed, and kernels need 3.5: pip install -U triton")
    lacking = missing_for_launcher(environ)
    if lacking is not None:
        return TritonFacts(False, f"Triton builds its launcher when it starts, and there is no {lacking}")
    return TritonFacts(True, f"Triton {version} is installed")


def missing_for_launcher(environ: Mapping[str, str]) -> str | None:
    """Return what is missing to compile the C code with which Triton starts kernels, and how to get it; or None."""
    path = environ.get("PATH")
    if "CC" not in environ and not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return "C compiler: apt install gcc, or set CC"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if exists(headers) else f"{headers}: apt install python3-dev"
