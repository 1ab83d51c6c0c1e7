"""Writes facts that Python defines as C++ headers: `write_constants.py SRC FOLDER`.

sizes.h: the sizes of ops/sizes.py. hash.h: the constants of noise of ops/seeds.py. activations.h: the activations of
ops/operations.py. block_sizes.h: the formats of ops/quant/block_formats.py.

Nothing but Python's own library is there when the package is built, and what this imports needs no more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

source, folder = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, source)

from ostinato.ops import seeds, sizes  # noqa: E402
from ostinato.ops.operations import HAS_GATES  # noqa: E402
from ostinato.ops.quant.block_formats import BLOCK_FORMATS  # noqa: E402


def size_lines() -> Iterator[str]:
    yield from (f"constexpr int {name} = {value};" for name, value in vars(sizes).items() if type(value) is int)


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


headers = {"sizes": size_lines, "hash": hash_lines, "activations": activation_lines, "block_sizes": block_lines}
for header, lines in headers.items():
    begin = [f"// Written by {Path(__file__).name}.", "#pragma once", "", "namespace ostinato {", ""]
    text = "\n".join([*begin, *lines(), "", "}  // namespace ostinato"]) + "\n"
    path = folder / f"{header}.h"
    if not path.is_file() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
