"""Which native kernels run here: the modules that are installed, and of those the best that this CPU can run.

Nothing is imported: a module for another CPU may not even load.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

CPU_FLAGS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        "x86_64_v3": _V3,
        "x86_64_v4": _V4,
        "x86_64_v4_bf16": _V4 | {"avx512_bf16", "avx512_vnni"},
    },
    "aarch64": {"aarch64": frozenset()},
}
"""By machine: the instruction sets that modules are built for, worst first, and the flags of /proc/cpuinfo that a CPU
must have for each (the x86-64 psABI's levels; `abm` is how Linux spells LZCNT)."""

HOW_TO_GET = (
    "install a C++17 compiler with OpenMP and Python's headers (Debian, Ubuntu: apt install g++ python3-dev), then "
    "Ostinato again (make native in a checkout, else pip install --force-reinstall --no-deps ostinato)"
)


@dataclass(frozen=True)
class NativeFacts:
    """`isa` names the module `ostinato._native_<isa>` to use, None if there is none; `reason` says why it is this one,
    or what is missing and how to get it."""

    isa: str | None
    reason: str


NOT_THIS_CPU = NativeFacts(None, "native kernels are for the CPU of this machine alone")
"""Of a GPU, or of a device that is only described."""


def detect_native(root: Path = Path("/")) -> NativeFacts:
    """The native kernels of this process's package, on the CPU that `root`/proc describes."""
    return choose_isa(installed_modules(), read_cpu_flags(root), platform.machine())


def installed_modules(package: Path = Path(__file__).parents[2]) -> frozenset[str]:
    """The instruction sets whose modules lie beside the package's sources and fit this interpreter."""
    known = (isa for isas in CPU_FLAGS.values() for isa in isas)
    return frozenset(
        isa for isa in known if any((package / f"_native_{isa}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
    )


def read_cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """The first CPU's flags in /proc/cpuinfo; none if there is no such file or line, as on ARM."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def choose_isa(installed: Collection[str], cpu_flags: Collection[str], machine: str) -> NativeFacts:
    """The best of the installed instruction sets that a CPU with `cpu_flags` runs; `machine` as `platform.machine`."""
    isas = CPU_FLAGS.get(machine)
    if isas is None:
        return NativeFacts(None, f"native kernels exist for {' and '.join(CPU_FLAGS)}, and this machine is {machine}")
    lacking = {isa: [flag for flag in sorted(needed) if flag not in cpu_flags] for isa, needed in isas.items()}
    runnable = [isa for isa in isas if not lacking[isa]]
    if not runnable:
        worst = next(iter(isas))
        return NativeFacts(
            None, f"native kernels need {worst} at least, and this CPU lacks {', '.join(lacking[worst])}"
        )
    best = runnable[-1]
    if best in installed:
        return NativeFacts(best, f"{best} is the best that this CPU runs")
    usable = [isa for isa in runnable if isa in installed]
    if usable:
        return NativeFacts(usable[-1], f"{usable[-1]} is installed; {best} would be better: {HOW_TO_GET}")
    others = [isa for isa in isas if isa in installed]
    if not others:
        return NativeFacts(None, f"no native kernels are installed: {HOW_TO_GET}")
    missing = ", ".join(lacking[others[0]])
    return NativeFacts(
        None, f"native kernels are installed for {', '.join(others)}, and this CPU lacks {missing}: {HOW_TO_GET}"
    )
