"""Compiles the Triton launches of models' steps for GPUs that need not be here, and looks at what the compiler made.

    python tools/check_triton.py benchmarks/models/*          every launch, every architecture and dtype
    python tools/check_triton.py --sample benchmarks/models/nemotron-h-300m

Launches are collected, not written down (`triton_launches.py`); operations that the models lack are called
(`triton_operations.py`). Each must compile without a spill or a stack frame, and its shared memory must fit the GPU.
And a kernel must not be compiled anew because a step has other sizes. Triton keeps what it compiled in its cache
(TRITON_CACHE_DIR), where an engine finds it: so a check that was cut off goes on where it was, and `--engines bfloat16`
compiles with all cores what engines of that dtype would compile one by one when they start.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing import Pool
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_launches import CAPABILITIES, Call, collected, compiled_anew, of_engines

KIB = 1024
SHARED = {90: 227 * KIB, 100: 227 * KIB, 103: 227 * KIB}
"""Bytes of shared memory that a block may have, by compute capability (CUDA's programming guide)."""

LEAST_SHARED = 99 * KIB
"""Of all others. 8.0 has more, but must fit into 8.6 and 8.9, too, which start the same launches."""


@dataclass(frozen=True)
class Made:
    """What became of a launch: `finding` is what is wrong with it, None for nothing."""

    call: Call
    registers: int = 0
    shared: int = 0
    finding: str | None = None


def compile_call(call: Call) -> Made:
    kernel = getattr(importlib.import_module(call.module), call.kernel)
    source = ASTSource(
        fn=kernel,
        signature=dict(call.signature),
        constexprs=dict(call.constants),
        attrs={place: [["tt.divisibility", 16]] if known else [] for place, known in call.attributes},
    )
    try:
        made = triton.compile(source, target=GPUTarget("cuda", call.capability, 32), options=call.options)
    except Exception as error:  # whatever the compiler says is the finding
        return Made(call, finding=f"{call}: {error}"[:2000])
    found = []
    most = SHARED.get(call.capability, LEAST_SHARED)
    if made.metadata.shared > most:
        found.append(f"{made.metadata.shared} bytes of shared memory, and there are {most}")
    usage = resources(made.asm["cubin"])
    found += [f"{name.lower()} {usage[name]} bytes" for name in ("STACK", "LOCAL") if usage[name]]
    finding = f"{call}: {', '.join(found)} (registers {usage['REG']})" if found else None
    return Made(call, usage["REG"], made.metadata.shared, finding)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack and of spills, by the tool of Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: max(map(int, re.findall(rf"{name}:(\d+)", text.stdout))) for name in ("REG", "STACK", "LOCAL")}


def report_of(made: Sequence[Made], models: Sequence[Path]) -> dict[str, Any]:
    """What was compiled and what came of it: by capability and kernel the launches, and the most that one takes."""
    by_capability: dict[str, dict[str, dict[str, int]]] = {}
    for each in sorted(made, key=lambda one: (one.call.capability, one.call.kernel)):
        kernels = by_capability.setdefault(f"sm_{each.call.capability}", {})
        one = kernels.setdefault(each.call.kernel, {"launches": 0, "most_registers": 0, "most_shared_bytes": 0})
        one["launches"] += 1
        one["most_registers"] = max(one["most_registers"], each.registers)
        one["most_shared_bytes"] = max(one["most_shared_bytes"], each.shared)
    return {
        "command": "tools/check_triton.py",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "triton": triton.__version__,
        "models": sorted(path.name for path in models),
        "launches": len(made),
        "findings": sorted(each.finding for each in made if each.finding is not None),
        "kernels": by_capability,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="directories with a config.json")
    parser.add_argument("--sample", action="store_true", help="one launch of each kernel, bfloat16, sm_90a")
    parser.add_argument("--kernel", help="only kernels whose name contains this")
    parser.add_argument("--capability", type=int, action="append", help="only this one, or these")
    parser.add_argument("--engines", metavar="DTYPE", help="only what engines of the models start in this dtype")
    parser.add_argument("--output", type=Path, help="a file for the report, as JSON")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    capabilities = (90,) if options.sample else tuple(options.capability or CAPABILITIES)
    if options.engines is None:
        calls, anew = collected(options.models, options.sample, capabilities), compiled_anew(options.models)
    else:
        calls, anew = of_engines(options.models, options.engines, capabilities), []
    calls = [call for call in calls if (options.kernel or "") in call.kernel]
    with Pool(options.jobs) as pool:
        made = list(pool.imap_unordered(compile_call, calls))
    report = report_of(made, options.models)
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = [*report["findings"], *(f"{call}: only for some sizes of a step" for call in anew)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    kernels = sorted({call.kernel for call in calls})
    print(f"{len(calls)} launches of {len(kernels)} kernels ({', '.join(kernels)}): {len(wrong)} with findings")
    return int(bool(wrong) or not calls)


if __name__ == "__main__":
    sys.exit(main())
