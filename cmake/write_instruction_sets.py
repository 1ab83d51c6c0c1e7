"""Write the instruction sets of src/ostinato/plan/device/isa_table.py for CMake.

The arguments are `SRC PROCESSOR FILE`.

Nothing but Python's own library is there when the package is built, and what this imports needs no more.
"""

from __future__ import annotations

import sys
from pathlib import Path

source, processor, target = sys.argv[1], sys.argv[2], Path(sys.argv[3])
sys.path.insert(0, source)

from ostinato.plan.device.isa_table import TABLE  # noqa: E402
from ostinato.plan.device.kernel_support import runnable_here  # noqa: E402

isas = TABLE.get(processor, ())
lines = [
    f"# Written by {Path(__file__).name}.",
    f"set(known_isas {' '.join(isa.name for isa in isas if not isa.is_stand_in)})",
    f"set(stand_ins {' '.join(isa.name for isa in isas if isa.is_stand_in)})",
    f"set(runnable_isas {' '.join(runnable_here())})",
    *(f"set(flags_of_{isa.name} {' '.join(isa.compiler_flags)})" for isa in isas),
]
target.parent.mkdir(parents=True, exist_ok=True)
target.write_text("\n".join(lines) + "\n")
