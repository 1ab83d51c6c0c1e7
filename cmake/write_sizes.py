"""Writes the sizes of src/ostinato/ops/sizes.py as C++ constants: `write_sizes.py SIZES HEADER`.

The file is loaded by its path: the package, which imports torch, is not installed when it is built.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

source, header = map(Path, sys.argv[1:])
sizes = {name: value for name, value in runpy.run_path(str(source)).items() if name.isupper()}
lines = [
    f"// Written by {Path(__file__).name} from ops/{source.name}, which says what each is.",
    "#pragma once",
    "",
    "namespace ostinato {",
    "",
    *(f"constexpr int {name} = {value};" for name, value in sizes.items()),
    "",
    "}  // namespace ostinato",
]
text = "\n".join(lines) + "\n"
if not header.is_file() or header.read_text() != text:
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(text)
