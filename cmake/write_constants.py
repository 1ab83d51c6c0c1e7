"""Writes facts that Python defines as C++ headers: `write_constants.py SRC FOLDER`.

sizes.h: the sizes of ops/sizes.py and the constants of ops/ukernels.py. ukernels.h: the rows of ops/ukernels.py that
C++ chooses by. hash.h: the constants of noise of ops/seeds.py. activations.h: the activations of
ops/operations.py. block_sizes.h: the formats of ops/quant/block_formats.py.

Nothing but Python's own library is there when the package is built, and what this imports needs no more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

source, folder = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, source)

from ostinato.ops import seeds, sizes, ukernels  # noqa: E402
from ostinato.ops.operations import HAS_GATES  # noqa: E402
from ostinato.ops.quant.block_formats import BLOCK_FORMATS  # noqa: E402


def size_lines() -> Iterator[str]:
    constants = vars(sizes) | vars(ukernels)
    yield from (f"constexpr int {name} = {value};" for name, value in constants.items() if type(value) is int)


def hash_lines() -> Iterator[str]:
    multipliers = ", ".join(f"{each:#x}" for each in seeds.HASH_MULTIPLIERS)
    yield f"constexpr unsigned HASH_MULTIPLIERS[] = {{{multipliers}}};"
    yield f"constexpr int HASH_SHIFTS[] = {{{', '.join(map(str, seeds.HASH_SHIFTS))}}};"
    yield f"constexpr float GUMBEL_MIDDLE = {seeds.GUMBEL_MIDDLE!r}f;"


def activation_lines() -> Iterator[str]:
    names = {name: name.upper() for name in HAS_GATES}
    gated = " || ".join(f"activation == {names[name]}" for name, has_gates in HAS_GATES.items() if has_gates)
    yield f"enum Activation : int {{ NONE, {', '.join(names.values())} }};"
    yield ""
    yield "struct ActivationName {"
    yield "    const char* name;"
    yield "    Activation activation;"
    yield "};"
    yield "constexpr ActivationName ACTIVATION_NAMES[] = {"
    yield from (f'    {{"{name}", {value}}},' for name, value in names.items())
    yield "};"
    yield ""
    yield "// Return whether half of the outputs are gates of the other half."
    yield f"inline bool has_gates(Activation activation) {{ return {gated}; }}"


def block_lines() -> Iterator[str]:
    yield "struct BlockSize {"
    yield "    const char* name;"
    yield "    int elements, bytes;"
    yield "};"
    yield ""
    yield "namespace block_sizes {"
    for each in BLOCK_FORMATS.values():
        yield f'constexpr BlockSize {each.name}{{"{each.name}", {each.elements}, {each.num_bytes}}};'
    yield "}  // namespace block_sizes"


def ukernel_lines() -> Iterator[str]:
    rows = [row for row in ukernels.ROWS if row.op in CHOSEN_OPS]
    features = sorted({name for row in rows for part in row.modules for name in part})
    kinds, types = ("same", "s8_row", "s8_group", *BLOCK_FORMATS), ("float32", "bfloat16", "float16", "int8")

    def mask(names: Iterable[str], among: Sequence[str]) -> str:
        return f"{sum(1 << among.index(name) for name in names):#x}"

    yield f"enum class Op {{ {', '.join(op.upper() for op in CHOSEN_OPS)} }};"
    yield f"enum class Driver {{ {', '.join(dict.fromkeys(row.driver for row in rows))} }};"
    yield f"enum class Unit {{ {', '.join(UNITS.values())} }};"
    quoted = ", ".join(f'"{kind}"' for kind in kinds)
    yield f"constexpr const char* RHS_KINDS[] = {{{quoted}}};"
    yield ""
    yield "constexpr unsigned FEATURES = 0"
    for name in features:
        emulated = f" || defined(OSTINATO_HAS_EMULATED_{name.upper()})" if name == "amx" else ""
        yield f"#if defined(OSTINATO_HAS_{name.upper()}){emulated}"
        yield f"    | {mask([name], features)}"
        yield "#endif"
    yield "    ;"
    yield ""
    yield "struct UkernelRow {"
    yield "    const char* name;"
    yield "    Op op;"
    yield "    Driver driver;"
    yield "    unsigned lhs, rhs, needs, without;  // bits of DType, RHS_KINDS and FEATURES"
    yield "    std::int64_t min_m, max_m, min_k, max_k, k_multiple;"
    yield "    Unit unit;"
    yield "    bool fixed_order;"
    yield "};"
    yield "constexpr UkernelRow UKERNELS[] = {"
    for row in rows:
        sets = (mask(row.lhs, types), mask(row.rhs, kinds), *(mask(part, features) for part in row.modules))
        bounds = (row.min_m, row.max_m or NO_BOUND, row.min_k, row.max_k or NO_BOUND, row.k_multiple)
        others = (f"Unit::{UNITS[row.unit]}", str(row.fixed_order).lower())
        numbers = ", ".join(map(str, (*sets, *bounds, *others)))
        yield f'    {{"{row.name}", Op::{row.op.upper()}, Driver::{row.driver}, {numbers}}},'
    yield "};"


CHOSEN_OPS = ("linear", "moe")
UNITS = {"tokens": "TOKENS", "mean per expert": "MEAN_PER_EXPERT"}
NO_BOUND = 2**62

headers = {"sizes": size_lines, "ukernels": ukernel_lines, "hash": hash_lines, "activations": activation_lines}
headers |= {"block_sizes": block_lines}
for header, lines in headers.items():
    begin = [f"// Written by {Path(__file__).name}.", "#pragma once", "", "#include <cstdint>", ""]
    text = "\n".join([*begin, "namespace ostinato {", "", *lines(), "", "}  // namespace ostinato"]) + "\n"
    path = folder / f"{header}.h"
    if not path.is_file() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
