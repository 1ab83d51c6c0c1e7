"""A model whose file is shortened while a process has it mapped: the system ends the process, which says why."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato import demo
from ostinato.plan.device.kernel_support import detect_native
from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(detect_native(Path("/")).isa is None, reason="without native kernels the system alone says it")
def test_a_process_names_the_model_before_it_ends(tmp_path):
    model = shutil.copytree(Path(demo.__file__).parent / "checkpoint", tmp_path / "model")
    code = (
        f"import sys, resource; sys.path.insert(0, {str(ROOT)!r}); resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from ostinato.config import EngineConfig; from tests.support.odd_engines import shortened\n"
        f"shortened(EngineConfig(model={str(model)!r}, threads=1), lambda *_: None)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert told.returncode == -signal.SIGBUS
    assert f"ModelError: a file of model {model} could not be read: it was shortened" in told.stderr
    assert told.stderr.count("ModelError") == 1
