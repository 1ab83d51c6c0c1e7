"""Check the native kernels of aarch64 on an x86-64 machine, under the emulator qemu.

Sets itself up in build/aarch64: Debian's arm64 packages of Python, unpacked, not installed; aarch64 wheels; and the
modules, built by a cross compiler. Then runs tests and the demo under processors of several kinds. `--quick` runs what
fits in five minutes once it is set up. Emulated speed says nothing about that of a processor.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
HOME = TREE / "build/aarch64"
ROOT, WHEELS, PACKAGE, LOGS = HOME / "root", HOME / "wheels", HOME / "package", HOME / "logs"
EMULATOR = "qemu-aarch64-static"
HOST_PACKAGES = {"qemu-aarch64-static": "qemu-user-static", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}
PYTHON = "python3.11"
TORCH = "torch==2.8.0"
"""The last torch whose aarch64 wheel on PyPI is built for CPUs alone; later ones are linked to CUDA's libraries."""
OF_TORCH = ("sympy", "networkx", "filelock", "fsspec", "typing_extensions", "jinja2")
DEBS = (
    *(f"{PYTHON}-minimal", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib", f"lib{PYTHON}-dev", "libc6", "libgcc-s1"),
    *("libstdc++6", "libgomp1", "libexpat1", "zlib1g", "libbz2-1.0", "liblzma5", "libffi8", "libssl3", "libsqlite3-0"),
    *("libuuid1", "libcrypt1", "libreadline8", "libtinfo6", "libncursesw6", "libnsl2", "libtirpc3", "libdb5.3"),
)
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)] + ["manylinux2014_aarch64"]


class AptError(Exception):
    """Debian's packages are not to be had; the message says what would help."""


def run(command: Iterable[object], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command of the set-up to its end; an error has the end of its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        kind = AptError if words[0] == "apt-get" else RuntimeError
        raise kind(f"{shlex.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


def install_host_packages() -> None:
    """Install emulator and cross compiler, where they are missing and apt may."""
    missing = [package for program, package in HOST_PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise AptError(f"this needs Debian's packages {', '.join(missing)}: sudo apt-get install {' '.join(missing)}")
    run(["apt-get", "update", "-q"])
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "install", "-yq", "--no-install-recommends", *missing], env=quiet)


def unpack_python() -> None:
    """Unpack the arm64 packages of Python into a folder. apt keeps its state there: nothing of this machine changes."""
    if (ROOT / "usr/bin" / PYTHON).exists():
        return
    if shutil.which("apt-get") is None:
        raise AptError("this needs apt-get, for Debian's arm64 packages of Python")
    state, debs = HOME / "apt", HOME / "debs"
    for folder in (state / "lists/partial", state / "cache/archives/partial", debs, ROOT):
        folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": state,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state / "cache",
    }
    apt = ["apt-get", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    run([*apt, "update", "-q"])
    run([*apt, "download", "-q", *DEBS], cwd=debs)
    for deb in debs.glob("*.deb"):
        run(["dpkg-deb", "-x", deb, ROOT])


def requirements() -> list[str]:
    """Return what tests and engines import, but for torch and what triton and frameworks want."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    tests = ("pytest", "hypothesis", "transformers", "gguf", "sentencepiece")
    from_tests = [each for each in project["optional-dependencies"]["test"] if re.split(r"[>=\[]", each)[0] in tests]
    return [each for each in (*project["dependencies"], *from_tests) if not each.startswith("torch")]


def install_wheels() -> None:
    """Install aarch64 wheels into a folder, at the versions of constraints.txt."""
    if (WHEELS / ".complete").exists():
        return
    constraints = HOME / "constraints.txt"
    lines = (TREE / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if not re.match(r"(torch|triton|nvidia)", line)))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", WHEELS, "--only-binary=:all:", "--upgrade"]
    pip += [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip += ["--python-version", PYTHON.removeprefix("python"), "--implementation", "cp"]
    # Alone: pip reads the markers of its packages for the machine it runs on, and would look for CUDA's.
    run([*pip, "--no-deps", TORCH])
    run([*pip, "--constraint", constraints, *requirements(), *OF_TORCH])
    (WHEELS / ".complete").touch()


def build() -> None:
    """Cross-compile the modules, and put a copy of the package with them where the emulated Python finds it."""
    cross = HOME / "cmake"
    options = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "OSTINATO_ISA": "all",
        "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": ROOT / "usr/include" / PYTHON,
        "SKBUILD_SOABI": f"cpython-{PYTHON.removeprefix('python').replace('.', '')}-aarch64-linux-gnu",
        "CMAKE_CXX_FLAGS": f"-isystem {ROOT / 'usr/include'}/{PYTHON} -idirafter {ROOT / 'usr/include'}",
    }
    defined = [word for name, value in options.items() for word in ("-D", f"{name}={value}")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**{name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}, "PATH": path}
    configure = ["cmake", "-S", TREE, "-B", cross, "-G", "Ninja", *defined, "--no-warn-unused-cli"]
    subprocess.run([*map(str, configure), "--log-level=NOTICE"], env=environ, check=True)
    if subprocess.run(["cmake", "--build", cross], env=environ, check=False).returncode != 0:
        sys.exit("the modules of aarch64 do not compile")
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(TREE / "src/ostinato", PACKAGE / "ostinato", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in cross.glob("_native_*.so"):
        shutil.copy(module, PACKAGE / "ostinato")


PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "--hypothesis-profile=few")
PARITY = "tests/parity/test_parity.py::test_greedy_tokens_and_their_logprobs_equal_transformers"
OF_EACH_LAYER = ("nemotron_h", "falcon_mamba", "qwen3_next", "kimi_linear", "lfm2", "lfm3", "gemma3_text", "gpt_oss")
"""Recipes that have every kind of layer together."""

OTHER_CPUS = {
    "cortex-a72": ("aarch64", "asimddp"),
    "a64fx": ("aarch64", "asimddp"),
    "neoverse-n1": ("aarch64_dotprod", "i8mm"),
}
"""CPU -> the module that it must run, and a feature whose lack must be named where a better module is declined."""

DECLINED = """
from ostinato.plan.device.kernel_support import CPU_FLAGS, choose_isa, detect_native
from ostinato.plan.device.linux import read_cpu_flags
assert detect_native().isa == {isa!r}, detect_native()
better = list(CPU_FLAGS["aarch64"])[-1]
reason = choose_isa([better], read_cpu_flags(), "aarch64").reason
assert f"installed for {{better}}, and this CPU lacks" in reason and {lacks!r} in reason, reason
print(reason)
"""


@dataclass(frozen=True)
class Part:
    """A command of the emulated Python, on a CPU that the emulator knows."""

    name: str
    cpu: str
    arguments: tuple[str, ...]
    is_quick: bool = False

    def run(self) -> str:
        """Run it, and return its line of the report, which begins with `FAILED` if it failed."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "LD_"))}
        environ |= {"PYTHONPATH": f"{PACKAGE}:{TREE}:{WHEELS}", "PYTHONDONTWRITEBYTECODE": "1"}
        log = LOGS / f"{self.name.replace(' ', '-')}.txt"
        command = [EMULATOR, "-cpu", self.cpu, "-L", ROOT, ROOT / "usr/bin" / PYTHON, *self.arguments]
        begin = time.monotonic()
        with log.open("w") as file:
            code = subprocess.run(command, cwd=TREE, env=environ, stdout=file, stderr=file, check=False).returncode
        seconds = time.monotonic() - begin
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")
        counted = re.sub(r" in [0-9.]+s.*", "", last).strip("= ")
        line = f"{self.name} on {self.cpu}: {counted[:200]} ({seconds:.0f} s)"
        return line if code == 0 else f"FAILED ({code}) {line}: see {log}"


def parts(groups: int) -> list[Part]:
    """Return all parts. Those of the kernels' tests are `groups`, since each begins with a slow import of torch."""
    files = [str(path.relative_to(TREE)) for path in sorted((TREE / "tests/ops").glob("test_*.py"))]
    files = [path for path in files if "native_sets" in (TREE / path).read_text()]
    table = "tests/ops/test_ukernels.py"
    one_case = (*PYTEST, "--cases", "one", table, "tests/ops/test_native_norm.py")
    question = "Leo had 50 cards and lost 8. How many cards are left?"
    found = [
        Part("one case of each", "max", one_case, is_quick=True),
        Part("generate demo", "max", ("-m", "ostinato", "generate", "demo", question), is_quick=True),
    ]
    for cpu, (isa, lacks) in OTHER_CPUS.items():
        found.append(Part(f"declined {cpu}", cpu, ("-c", DECLINED.format(isa=isa, lacks=lacks)), is_quick=True))
        found.append(Part(f"micro-kernels {cpu}", cpu, (*PYTEST, table)))
    found += [Part(f"kernels {n + 1}", "max", (*PYTEST, *files[n::groups])) for n in range(groups)]
    cells = [f"{PARITY}[{name}-batch in chunks of 29]" for name in OF_EACH_LAYER]
    found.append(Part("parity", "max", (*PYTEST, *cells)))
    found.append(Part("verify demo", "max", ("-m", "ostinato", "verify", "demo", "--quick")))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="run what fits in five minutes, once it is set up")
    parser.add_argument("--only", nargs="*", help="run the parts whose names begin so")
    parser.add_argument("--as-built", action="store_true", help="build nothing: take the modules of the last run")
    options = parser.parse_args(arguments)
    HOME.mkdir(parents=True, exist_ok=True)
    try:
        install_host_packages()
        unpack_python()
    except AptError as reason:
        print(f"SKIPPED: aarch64 was not checked.\n{reason}")
        return 0
    install_wheels()
    if not options.as_built:
        build()
    LOGS.mkdir(exist_ok=True)
    workers = os.process_cpu_count() if sys.version_info >= (3, 13) else len(os.sched_getaffinity(0))
    chosen = [part for part in parts(workers or 1) if part.is_quick or not options.quick]
    if options.only:
        chosen = [part for part in chosen if part.name.startswith(tuple(options.only))]
    version = run([EMULATOR, "--version"]).stdout.partition("\n")[0]
    print(f"{date.today()}, {version}, {TORCH}, modules {', '.join(sorted(m.name.split('.')[0] for m in modules()))}")
    failures = 0
    with ThreadPoolExecutor(workers) as pool:
        for line in pool.map(Part.run, chosen):
            print(line, flush=True)
            failures += line.startswith("FAILED")
    return 1 if failures else 0


def modules() -> list[Path]:
    return list((PACKAGE / "ostinato").glob("_native_*.so"))


if __name__ == "__main__":
    sys.exit(main())
