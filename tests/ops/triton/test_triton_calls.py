"""How Triton kernels are chosen and called: like references, as one call that a recorder notes."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from ostinato.graphs.recorder import CallRecorder
from ostinato.ops.dispatch import reference_kernel, select_ops, triton_kernel
from ostinato.ops.launch_tables.launch import Launch, power_of_two
from ostinato.ops.operations import OPERATIONS
from tests.support.triton_kernels import require_triton

require_triton()

CHOSEN = [name for name, row in OPERATIONS.items() if row.triton is not None]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_kernel_takes_what_its_reference_takes(name: str) -> None:
    own, right = (
        [(each.name, each.default, each.kind) for each in inspect.signature(kernel).parameters.values()]
        for kernel in (triton_kernel(name), reference_kernel(name))
    )
    assert own == right


@pytest.mark.slow
def test_triton_is_imported_only_where_a_kernel_of_it_is_chosen() -> None:
    code = (
        "import sys; from ostinato.ops.dispatch import select_ops; select_ops({'rms_norm': 'reference'});"
        "assert 'ostinato.ops.triton.common' not in sys.modules;"
        "select_ops({'rms_norm': 'triton'}); sys.exit('ostinato.ops.triton.common' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_recorder_notes_a_kernel_as_one_call() -> None:
    ops = select_ops({"rms_norm": "triton"})
    x, weight = torch.randn(2, 16), torch.ones(16)
    persistent = {tensor.untyped_storage().data_ptr(): "buffers" for tensor in (x, weight)}
    recorder = CallRecorder(persistent, ())
    ops.hook.recorder = recorder
    with recorder:
        ops.rms_norm(x, weight, 1e-6)
    assert [(call.kind, call.name) for call in recorder.calls] == [("kernel", "rms_norm")]


def test_a_launch_has_a_number_of_warps_that_exists() -> None:
    with pytest.raises(AssertionError, match="power of two"):
        Launch("kernel", num_warps=3)
    assert [power_of_two(size, least=2, most=8) for size in (0, 1, 3, 8, 9)] == [2, 2, 4, 8, 8]
