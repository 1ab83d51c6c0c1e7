"""Instruction sets that the native kernels are compiled for: the single source of their names and flags.

The build reads this file, too (`cmake/write_instruction_sets.py`), where no package is installed: it imports nothing
beyond Python's own library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Feature = Literal[
    "avx2", "avx512", "avx512_bf16", "avx512_vnni", "avx512_vbmi", "amx", "emulated_amx", "dotprod", "i8mm", "neon_bf16"
]
"""Instructions that kernels use beyond plain C++.

`avx2` includes FMA and F16C; `avx512` is that of x86-64-v4; `avx512_vbmi` includes GFNI. `emulated_amx` is plain C++ in
place of `amx`, with the same bits. On ARM: `dotprod` is SDOT, `i8mm` SMMLA, `neon_bf16` BFDOT and BFMMLA.
"""


@dataclass(frozen=True)
class InstructionSet:
    """Instruction set of a module `ostinato._native_<name>`.

    A CPU must have `cpu_flags`, as `read_cpu_flags` returns them on either architecture. A stand-in is for tests: the
    plan never chooses it, and it has some kernels only.
    """

    name: str
    cpu_flags: frozenset[str]
    options: tuple[str, ...]
    """Options of the compiler."""
    features: frozenset[Feature] = frozenset()
    is_stand_in: bool = False
    slow_on: frozenset[str] | None = None
    """Flags of CPUs on which the module before it is faster; None if there are none."""

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """The compiler's options, with a macro `OSTINATO_HAS_…` for each feature."""
        return (*self.options, *(f"-DOSTINATO_HAS_{feature.upper()}" for feature in sorted(self.features)))


MATRIX_UNITS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""Flags of matrix units. A process must ask the operating system before it uses them (`ostinato.os_support`)."""

# The x86-64 psABI's levels; `abm` is how Linux spells LZCNT.
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_VNNI = _V4 | {"avx512_vnni"}
_V4_BF16 = _V4_VNNI | {"avx512_bf16"}
# Every processor with matrix units has them.
_BESIDE_MATRIX_UNITS = frozenset({"avx512vbmi", "gfni"})

# Intel's vectors since Sapphire Rapids take two cycles for 32 products of bfloat16, and half a cycle for 16 of float32.
_SLOW_BF16 = frozenset({"GenuineIntel", "avx512_bf16", "avx512_fp16"})

# Vectors of 512 bits where there are any: CPUs that run slower with them have become rare.
_COMPILE_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_COMPILE_V4_VNNI = (*_COMPILE_V4, "-mavx512vnni")
_COMPILE_V4_BF16 = (*_COMPILE_V4_VNNI, "-mavx512bf16")
_COMPILE_AMX = (*_COMPILE_V4_BF16, "-mavx512vbmi", "-mgfni", "-mamx-tile", "-mamx-bf16", "-mamx-int8")

_AVX2: frozenset[Feature] = frozenset({"avx2"})
_AVX512: frozenset[Feature] = _AVX2 | {"avx512"}
_VNNI: frozenset[Feature] = _AVX512 | {"avx512_vnni"}
_BF16: frozenset[Feature] = _VNNI | {"avx512_bf16"}
_AMX: frozenset[Feature] = _BF16 | {"avx512_vbmi", "amx"}

# `atomics` and `asimdrdm` are ARMv8.1, which the compiler takes for granted.
_DOTPROD = frozenset({"asimd", "atomics", "asimdrdm", "asimddp"})
_I8MM_BF16 = _DOTPROD | {"i8mm", "bf16"}
_ALL_OF_NEON: frozenset[Feature] = frozenset({"dotprod", "i8mm", "neon_bf16"})

TABLE: dict[str, tuple[InstructionSet, ...]] = {
    "x86_64": (
        InstructionSet("x86_64_v3", _V3, ("-march=x86-64-v3",), _AVX2),
        InstructionSet("x86_64_v4", _V4, _COMPILE_V4, _AVX512),
        InstructionSet("x86_64_v4_vnni", _V4_VNNI, _COMPILE_V4_VNNI, _VNNI),
        InstructionSet("x86_64_v4_bf16", _V4_BF16, _COMPILE_V4_BF16, _BF16, slow_on=_SLOW_BF16),
        InstructionSet("x86_64_v4_amx", _V4_BF16 | _BESIDE_MATRIX_UNITS | MATRIX_UNITS, _COMPILE_AMX, _AMX),
        InstructionSet("x86_64_v4_emulated_tiles", _V4, _COMPILE_V4, _AVX512 | {"emulated_amx"}, is_stand_in=True),
    ),
    "aarch64": (
        InstructionSet("aarch64", frozenset(), ()),
        InstructionSet("aarch64_dotprod", _DOTPROD, ("-march=armv8.2-a+dotprod",), frozenset({"dotprod"})),
        InstructionSet("aarch64_i8mm_bf16", _I8MM_BF16, ("-march=armv8.2-a+dotprod+i8mm+bf16",), _ALL_OF_NEON),
    ),
}
"""Machine, as `platform.machine` names it -> the instruction sets that modules are built for, worst first."""
