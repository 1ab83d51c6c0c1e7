"""What Triton's compiler makes of launches. `make triton-check` compiles all of them, for four generations of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.ops.operations import OPERATIONS
from tests.support.triton_kernels import require_triton

require_triton()

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_launch_of_each_kernel_compiles_without_spills_and_fits_the_gpu() -> None:
    """In a process of its own: here kernels are made for the interpreter."""
    models = [ROOT / "benchmarks/models" / name for name in ("nemotron-h-300m", "qwen3-vl-300m")]
    command = [sys.executable, str(ROOT / "tools/check_triton.py"), "--sample", "--jobs", "1", *map(str, models)]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_triton_kernel_has_a_launch_table() -> None:
    assert {name for name, row in OPERATIONS.items() if row.triton is not None and row.triton.launches is None} == set()
