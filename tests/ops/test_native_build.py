"""The built extension in this process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostinato.ops import dispatch, sizes
from ostinato.ops.dispatch import load_extension
from ostinato.plan.device.kernel_support import detect_native

NATIVE = detect_native()


@pytest.mark.skipif(NATIVE.isa is None, reason=NATIVE.reason)
def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    # In a process of its own: a library that another test imported may carry a runtime too, as sentencepiece does.
    script = (
        "from pathlib import Path; from ostinato.ops.dispatch import load_extension;"
        f"load_extension({NATIVE.isa!r}); print(Path('/proc/self/maps').read_text())"
    )
    maps = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    mapped = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    runtimes = [path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    if any(Path(path).name.startswith("libomp") for path in runtimes):
        pytest.skip("built by clang, which has a runtime of its own")
    assert len(runtimes) == 1


def test_kernels_with_matrix_units_are_loaded_only_where_the_process_may_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ostinato._native_made_up", SimpleNamespace(tiles="amx"))
    monkeypatch.setattr(dispatch, "request_matrix_units", lambda: "not today")
    with pytest.raises(ImportError, match=r"made_up needs matrix units, .* refuses"):
        load_extension("made_up")
    monkeypatch.setattr(dispatch, "request_matrix_units", lambda: None)
    assert load_extension("made_up").tiles == "amx"


def test_cpp_gets_every_size_under_its_own_name(tmp_path: Path) -> None:
    written = tmp_path / "generated/sizes.h"
    root = Path(__file__).parents[2]
    script, source = root / "cmake/write_sizes.py", root / "src/ostinato/ops/sizes.py"
    # Isolated, and without site-packages: a build has no torch.
    subprocess.run([sys.executable, "-I", "-S", script, source, written], check=True)
    constants = dict(re.findall(r"constexpr int (\w+) = (\d+);", written.read_text()))
    assert constants == {name: str(value) for name, value in vars(sizes).items() if name.isupper()}
