"""The built extension in this process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostinato.ops import dispatch, sizes, ukernels
from ostinato.ops.dispatch import load_extension
from ostinato.ops.operations import HAS_GATES
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.reference.matmul import ACTIVATIONS
from ostinato.ops.seeds import GUMBEL_MIDDLE
from ostinato.plan.device.kernel_support import detect_native

NATIVE = detect_native()


@pytest.mark.skipif(NATIVE.isa is None, reason=NATIVE.reason)
def test_the_kernels_bring_no_openmp_runtime() -> None:
    # In a process of its own: a library that another test imported may carry a runtime too, as sentencepiece does.
    script = (
        "from pathlib import Path; from ostinato.ops.dispatch import load_extension;"
        f"load_extension({NATIVE.isa!r}); print(Path('/proc/self/maps').read_text())"
    )
    maps = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    mapped = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    runtimes = [path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    assert runtimes == []


def test_kernels_with_matrix_units_are_loaded_only_where_the_process_may_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[int] = []
    monkeypatch.setitem(
        sys.modules, "ostinato._native_made_up", SimpleNamespace(tiles="amx", set_spin_turns=turns.append)
    )
    monkeypatch.setattr(dispatch, "request_matrix_units", lambda: "not today")
    with pytest.raises(ImportError, match=r"made_up needs matrix units, .* refuses"):
        load_extension("made_up")
    monkeypatch.setattr(dispatch, "request_matrix_units", lambda: None)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert load_extension("made_up").tiles == "amx"
    assert turns == [7]


@pytest.fixture
def written(tmp_path: Path) -> dict[str, str]:
    """The headers that the build writes for C++, by name."""
    root = Path(__file__).parents[2]
    # Isolated, and without site-packages: a build has no torch.
    script = root / "cmake/write_constants.py"
    subprocess.run([sys.executable, "-I", "-S", "-B", script, root / "src", tmp_path / "generated"], check=True)
    return {path.stem: path.read_text() for path in (tmp_path / "generated").iterdir()}


def test_cpp_gets_every_size_under_its_own_name(written: dict[str, str]) -> None:
    constants = dict(re.findall(r"constexpr int (\w+) = (-?\d+);", written["sizes"]))
    values = vars(sizes) | vars(ukernels)
    assert constants == {name: str(value) for name, value in values.items() if type(value) is int}


def test_cpp_gets_the_hash_and_the_middle_of_the_noise(written: dict[str, str]) -> None:
    assert "HASH_MULTIPLIERS[] = {0x7feb352d, 0x846ca68b};" in written["hash"]
    assert "HASH_SHIFTS[] = {16, 15, 16};" in written["hash"]
    [middle] = re.findall(r"GUMBEL_MIDDLE = ([\d.]+)f;", written["hash"])
    assert float(middle) == GUMBEL_MIDDLE


def test_every_activation_has_a_reference_and_a_name_in_cpp(written: dict[str, str]) -> None:
    assert HAS_GATES.keys() == ACTIVATIONS.keys()
    assert re.findall(r'\{"(\w+)", \w+\}', written["activations"]) == list(HAS_GATES)


def test_cpp_gets_the_sizes_of_every_block_format(written: dict[str, str]) -> None:
    found = re.findall(r'BlockSize (\w+)\{"(\w+)", (\d+), (\d+)\};', written["block_sizes"])
    assert found == [(name, name, str(each.elements), str(each.num_bytes)) for name, each in BLOCK_FORMATS.items()]
