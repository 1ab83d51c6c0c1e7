"""Instruction sets that the native kernels are compiled for: the single source of their names and flags.

The build reads this file, too (`cmake/write_instruction_sets.py`), where no package is installed: it imports nothing
beyond Python's own library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionSet:
    """Instruction set of a module `ostinato._native_<name>`.

    A CPU must have `cpu_flags`, as /proc/cpuinfo spells them; the compiler gets `compiler_flags`. A stand-in is for
    tests: the plan never chooses it, and it has some kernels only.
    """

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]
    is_stand_in: bool = False


MATRIX_UNITS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""Flags of matrix units. A process must ask the operating system before it uses them (`ostinato.os_support`)."""

# The x86-64 psABI's levels; `abm` is how Linux spells LZCNT.
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
# Every processor with matrix units has them.
_BESIDE_MATRIX_UNITS = frozenset({"avx512vbmi", "gfni"})

# Vectors of 512 bits where there are any: CPUs that run slower with them have become rare.
_COMPILE_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_COMPILE_V4_BF16 = (*_COMPILE_V4, "-mavx512bf16", "-mavx512vnni")
_COMPILE_AMX = (*_COMPILE_V4_BF16, "-mavx512vbmi", "-mgfni", "-mamx-tile", "-mamx-bf16", "-mamx-int8")

TABLE: dict[str, tuple[InstructionSet, ...]] = {
    "x86_64": (
        InstructionSet("x86_64_v3", _V3, ("-march=x86-64-v3",)),
        InstructionSet("x86_64_v4", _V4, _COMPILE_V4),
        InstructionSet("x86_64_v4_bf16", _V4_BF16, _COMPILE_V4_BF16),
        InstructionSet("x86_64_v4_amx", _V4_BF16 | _BESIDE_MATRIX_UNITS | MATRIX_UNITS, _COMPILE_AMX),
        InstructionSet("x86_64_v4_emulated_tiles", _V4, (*_COMPILE_V4, "-DOSTINATO_EMULATED_TILES"), is_stand_in=True),
    ),
    "aarch64": (InstructionSet("aarch64", frozenset(), ()),),
}
"""Machine, as `platform.machine` names it -> the instruction sets that modules are built for, worst first."""
