"""Compilation of the kernels that engines start, by all cores, into Triton's cache before anything is measured.

An engine compiles what it needs one by one, a second each, when it starts and when a step needs another launch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ostinato.bench.gpu.process import Finished, run_within

TOOL = "tools/check_triton.py"


def compiled(arguments: Sequence[str], seconds: float, checkout: Path) -> tuple[Finished, dict[str, Any] | None]:
    """Run the tool of the `checkout`; return its process, and the tool's report if it has written one."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [sys.executable, TOOL, *arguments, "--output", str(path)]
        finished = run_within(command, seconds, directory=checkout)
        return finished, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
