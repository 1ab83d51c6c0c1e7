"""Rehearses `ostinato gpu-check` without a GPU, and prints the command for a machine with one.

    make gpu-rehearsal                        every part, then every planted fault, then the size of the tree
    make gpu-rehearsal PARTS=kernels,seeds    some parts and their faults
    make gpu-rehearsal SET_UP=1               measures how long an environment takes from nothing, too
    make gpu-rehearsal WHEELS=build/wheels    fetches what a machine with torch, but without a network, lacks

The whole check runs on a pretended GPU (`tests/support/pretended_gpu.py`), in tiny shapes. Its figures mean nothing;
that there are all, and that a fault in a part is seen, is what it shows. Ends with status 1 if a part is not ok, if a
planted fault is not seen, or if the tree is too large to travel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["TRITON_INTERPRET"] = "1"

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ostinato.bench import engine_driver
from ostinato.bench.gpu.gpu_report import make_report, part_rows
from ostinato.bench.gpu.parts import Check, make_checks
from ostinato.bench.gpu.run_parts import CheckOutcome, measure_apart
from ostinato.cli.gpu_check import chosen_checks, run_and_report
from ostinato.json_io import JsonObject
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from tests.support.checkpoints import checkpoint
from tests.support.pretended_gpu import BANDWIDTH, PLANTS, pretend

ROOT = Path(__file__).resolve().parents[1]
NOTE = "A rehearsal on a pretended GPU, in tiny shapes: the figures mean nothing."
MOST_BYTES = 64 * 2**20
"""Largest tree that travels."""
MINUTES = 60.0
"""Minutes that a rehearsal may take; the interpreter is slow."""
MOST_MINUTES = 9.0
"""Minutes of set-up and check together."""
MOST_WHEEL_BYTES = 60 * 2**20
EXTRAS = "gpu"
LEFT_OUT = ("torch", "triton", "nvidia", "cuda", "flashinfer")
"""Beginnings of names of packages that come with torch for CUDA, or are too large to travel."""
KERNEL_TESTS = ["tests/ops/triton/test_triton_elementwise.py", "tests/ops/triton/test_triton_state.py"]
GPU_TESTS = ["tests/gpu/test_gpu_parity.py", "--gpu-device", "cpu", "-m", "gpu", "-k"]
COMPILED = ["--engines", "bfloat16", "--capability", "90", "--kernel", "embedding", "--jobs", "1"]
STATE = {"heads": 1, "head_dim": 4, "groups": 1, "state_size": 16, "chunk_size": 16}
DELTA = {"key_heads": 1, "heads": 1, "key_dim": 16, "value_dim": 16}


def toy_checks() -> tuple[Check, ...]:
    """Return the checks of `gpu-check` with other settings, and other values of the same options.

    Engines of three checks run as on a GPU, in Triton's interpreter, some seconds for a step. Others run on the CPU.
    """
    tiny = {
        "model": str(checkpoint("nemotron_h_dense")), "device": "cuda", "dtype": "float32", "cache_memory": "4MiB",
        "max_num_seqs": 2, "capture_sizes": "8", "capture_rows": "1,2",
    }  # fmt: skip
    few = {"max_num_batched_tokens": 24}
    cpu = {"random_weights": True, "device": "cpu", "threads": 1, "dtype": "float32", "cache_memory": "96MiB"}
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "capture_sizes": "8,20,24", "capture_rows": "1,2"}
    demo = {"model": "demo", **cpu}
    text = {**demo, **sizes}
    many = {**text, "max_num_seqs": 128, "capture_rows": "1,2,128"}
    images = {**cpu, "model": "demo-vl", "max_num_seqs": 2, "encoder_token_budgets": "16,64"}
    layers = {"state": STATE, "delta": DELTA, "dtype": "float32"}
    rows = {"rows": (1, 2)}
    output = {"prompt_len": 8, "output_len": 3, "rounds": 1}
    trial = {"max_tokens": 3}
    changes: dict[str, tuple[dict[str, object], dict[str, object]]] = {
        "kernel-tests": ({}, {"arguments": [*KERNEL_TESTS, "-k", "norm or padding_rows"]}),
        "compile": ({}, {"arguments": [*COMPILED, "benchmarks/models/nemotron-h-300m"]}),
        "memory": ({**tiny, **few}, {"prompt_len": 8}),
        "ladder": (text, {"prompt_len": 8, "rounds": 1, **rows, "off_stride": (20, 24)}),
        # What is refused must be refused for its slots alone.
        "coverage": ({**tiny, "capture_rows": "1"}, {**rows, "too_many": 1000, "slots_memory": "256KiB"}),
        "encoder": (images, {"arrivals": 1, "rounds": 1, "max_pixels": 4096}),
        "drafts": ({}, {"arguments": [*GPU_TESTS, "drafts and mamba2"]}),
        "verify-demo": ({**demo, "max_model_len": 256}, trial),
        "verify-300m": ({**cpu, "model": str(checkpoint("llama"))}, trial),
        "gpu-tests": ({}, {"arguments": [*GPU_TESTS, "joins and nemotron_h_dense"]}),
        "updates": (text, {**layers, "rows": (1, 64)}),
        "decode-8b": (many, {**output, "batch_sizes": (1, 2, 128)}),
        "operations-8b": (text, {"context": 8, "prefill": 24, "rounds": 1, "batch_sizes": (1, 2)}),
        "prefill": (text, {**layers, "tokens": 24}),
        "overlap": (text, {**output, "batch_sizes": (1, 2)}),
        "server": ({**demo, "max_model_len": 256}, {"requests": 2, "concurrency": 1, "output_len": 3}),
        "predicted-8b": ({**tiny, **few}, {"prompt_len": 8, "rounds": 1, **rows}),
    }
    found = []
    for check in make_checks(ROOT, 90):
        settings, options = changes.pop(check.name)
        assert options.keys() <= check.options.keys(), f"{check.name} has no such options"
        kept = {} if check.kind != "tests" else {"workers": 0}
        found.append(replace(check, settings=settings, options={**check.options, **options, **kept}))
    assert not changes
    return tuple(found)


def measure(check: Check, limit: float, plant: str | None = None) -> CheckOutcome:
    """As `measure_apart`, with the pretended GPU in the process, and the planted fault."""
    if plant is not None and check.kind == "tests":
        arguments = ["-p", "tests.support.pretended_gpu", *check.options["arguments"]]
        check = replace(check, options={**check.options, "arguments": arguments})
    command = (sys.executable, str(Path(__file__).resolve()), "--worker", *((plant,) if plant is not None else ()))
    return measure_apart(check, max(limit, 600), ROOT, command)


def rehearse(checks: Sequence[Check], output: Path) -> list[str]:
    """Run all checks, and beside them each fault in the one that must show it; return what went wrong."""
    device = replace(detect("cpu"), name="pretended", bandwidth=BANDWIDTH, source="pretended")
    faults = [(plant, check) for plant, name in PLANTS.items() for check in checks if check.name == name]
    with ThreadPoolExecutor(1) as pool:
        judged = pool.map(lambda fault: planted(*fault, device), faults)
        report, _ = run_and_report(checks, device, MINUTES, output, measure, NOTE)
        rows = report.data["parts"]
        wrong = [f"{row['name']} is {row['outcome']} ({row['reason']})" for row in rows if row["outcome"] != "ok"]
        wrong += [note for note in report.notes if note != NOTE]
        for (plant, _), row in zip(faults, judged, strict=True):
            print(f"planted {plant}: {row['name']} is {row['outcome']} ({row['reason']})", flush=True)
            wrong += [f"{plant} was not seen"] if row["outcome"] not in ("failed", "missed") else []
    return wrong


def planted(plant: str, check: Check, device: DeviceSpec) -> JsonObject:
    """Run a check with a fault; return its part's row, judged by the check and the marks that it can measure alone."""
    outcome = measure(check, MINUTES * 60, plant)
    report = make_report([outcome], device, MINUTES * 60, NOTE)
    [row] = part_rows([outcome], [mark for mark in report.data["marks"] if mark["is_met"] is not None])
    return row


def tree_bytes() -> int:
    """Return the size of all files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return sum(os.lstat(name).st_size for name in listed.split("\0") if name and os.path.lexists(name))


def set_up_seconds() -> float:
    """Install the tree and what it needs into an environment made from nothing; return how long that took."""
    with TemporaryDirectory() as directory:
        begin = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        pip = [f"{directory}/bin/pip", "install", "--quiet", "--no-cache-dir"]
        native = ["--config-settings=cmake.define.OSTINATO_ISA=none"]
        subprocess.run([*pip, *native, "--constraint", "constraints.txt", f".[{EXTRAS}]"], check=True)
        return time.monotonic() - begin


def fetch_wheels(directory: Path) -> int:
    """Fetch what Ostinato needs besides torch, at this environment's versions; return the bytes.

    What brings compilers or gigabytes is left out by name, and a GPU's machine must have it, or does without.
    """
    needed, left_out = {"ostinato": ""}, set()
    for name in (pending := ["ostinato"]):
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            wanted = canonicalize_name(requirement.name)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": EXTRAS}):
                continue
            if wanted.startswith(LEFT_OUT):
                left_out.add(wanted)
            elif wanted not in needed:
                needed[wanted] = version_of(wanted)
                pending += [wanted] if needed[wanted] else []
    del needed["ostinato"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pinned = [f"{name}=={version}" if version else name for name, version in needed.items()]
    subprocess.run([*pip, "--dest", str(directory), *pinned], check=True)
    print(f"left out of the wheels: {', '.join(sorted(left_out))}")
    return sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))


def version_of(name: str) -> str:
    """Return the installed version of a package; nothing if it is not installed, which takes the newest."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/gpu-rehearsal"), help="where the report goes")
    parser.add_argument("--parts", help="only these, separated by commas")
    parser.add_argument("--set-up", action="store_true", help="measure an environment from nothing: gigabytes")
    parser.add_argument("--wheels", type=Path, help="fetch wheels into this folder: tens of megabytes")
    parser.add_argument("--worker", nargs="?", const="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        torch.set_num_threads(1)
        pretend(options.worker or None)
        engine_driver.main()
        return 0
    wrong = rehearse(chosen_checks(toy_checks(), options.parts), options.output)
    size = tree_bytes()
    print(f"the tree has {size / 2**20:.1f} MiB, and may have {MOST_BYTES / 2**20:.0f}")
    wrong += [f"the tree has {size} bytes, and {MOST_BYTES} may travel"] if size > MOST_BYTES else []
    minutes = MOST_MINUTES
    if options.set_up:
        seconds = set_up_seconds()
        minutes = MOST_MINUTES - seconds / 60
        print(f"an environment from nothing takes {seconds:.0f} s on this machine")
    if options.wheels is not None:
        num_bytes = fetch_wheels(options.wheels)
        print(f"the wheels have {num_bytes / 2**20:.1f} MiB, and may have {MOST_WHEEL_BYTES / 2**20:.0f}")
        wrong += [f"the wheels have {num_bytes} bytes"] if num_bytes > MOST_WHEEL_BYTES else []
    command = command_there(max(1, int(minutes)), options.wheels)
    print(f"on a machine with a GPU, in the tree's folder:\n{command}")
    print(*(f"WRONG: {each}" for each in wrong), sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


def command_there(minutes: int, wheels: Path | None) -> str:
    """Return the one command that sets up and checks, with a torch for CUDA that is there already, or from nothing.

    With `wheels`, pip needs no network, and the package runs from its tree.
    """
    python = "build/gpu/bin/python"
    check = f'-m ostinato gpu-check --minutes {minutes} --checkout . --output "${{OUT:-build}}/gpu-check"'
    install = f"{python} -m pip install -q --config-settings=cmake.define.OSTINATO_ISA=none '.[{EXTRAS}]'"
    if wheels is not None:
        install = f"{python} -m pip install -q --no-deps {wheels}/*.whl"
        python = f"PYTHONPATH=src {python}"
    return f"python3 -m venv --system-site-packages build/gpu && {install} && {python} {check}"


if __name__ == "__main__":
    sys.exit(main())
