"""Detection of the device of this machine.

Nothing here imports torch: a GPU is found through `nvidia-smi` or /proc, memory and cores of a CPU through /proc and
the cgroups that limit the process.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path

from ostinato.errors import ConfigError, Remedy
from ostinato.files import matches
from ostinato.os_support import usable_cores
from ostinato.plan.device.gpu_catalogue import CATALOGUE, DEVICE_NAMES, DeviceSpec
from ostinato.plan.device.kernel_support import detect_native, detect_triton
from ostinato.plan.device.linux import core_limit, cpu_model, memory_limit, processor_of, read_lines
from ostinato.plan.device.measured_rates import Rates, cache_directory, kept_rates, kernels_of
from ostinato.units import KiB, MiB


def find_device(name: str) -> DeviceSpec:
    """Return a device of the catalogue, or `detect`'s for auto, cpu and cuda. ConfigError for other names."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    if name in ("auto", "cpu", "cuda"):
        return detect(name)
    word = name.lower().split(":")[0].replace(" ", "").replace("gpu", "cuda")
    near = [known for known in ("cuda", *DEVICE_NAMES) if known.startswith(word) or word in known.split("-")]
    near = near or get_close_matches(word, ("auto", "cuda", *DEVICE_NAMES), 1)
    meant = f"did you mean {near[0]}? The" if near and word else "the"
    message = f"device {name!r} is not known; {meant} known ones are auto, cuda, {', '.join(DEVICE_NAMES)}"
    raise ConfigError(message, [Remedy("device", near[0])] if near and word else [])


def detect(device: str = "auto", root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> DeviceSpec:
    """Return the device of this machine: `cpu`, `cuda`, or for `auto` a GPU if torch can use one.

    `root` is the directory that contains /proc and /sys. ConfigError if `cuda` is asked for and there is none.
    """
    gpu = None if device == "cpu" else _detect_gpu(root, environ)
    usable = _torch_supports_cuda()
    if gpu is not None and usable:
        return replace(gpu, triton=detect_triton(gpu.capability, environ))
    if device == "cuda":
        reason = "torch is built for the CPU only" if gpu is not None else "no NVIDIA GPU was found"
        raise ConfigError(f"device cuda cannot be used: {reason}; set device to cpu or auto")
    cpu = _detect_cpu(root, environ)
    if gpu is None:
        return cpu
    return replace(cpu, source=f"{cpu.source}; {gpu.name} is not used, since torch is built for the CPU only")


def _detect_cpu(root: Path, environ: Mapping[str, str]) -> DeviceSpec:
    memory, limit = _installed_memory(root), memory_limit(root)
    source = f"this machine ({cpu_model(root)})"
    if limit is not None and limit < memory:
        memory, source = limit, f"{source}, memory limited by its cgroup"
    cores, quota = usable_cores(), core_limit(root)
    if quota is not None and quota < cores:
        cores, source = quota, f"{source}, cores limited by its cgroup"
    native = detect_native(root)
    return DeviceSpec("cpu", "cpu", memory, cores, None, None, source, native, _kept_rates(root, native.isa, environ))


def _kept_rates(root: Path, isa: str | None, environ: Mapping[str, str]) -> tuple[Rates, ...]:
    """Return the measured rates of this processor with the kernels that are installed now."""
    if isa is None:
        return ()
    kept = kept_rates(processor_of(root), cache_directory(environ))
    kernels = kernels_of(isa) if kept else None
    return tuple(rates for rates in kept if rates.kernels == kernels)


def _installed_memory(root: Path) -> int:
    """Return the bytes of RAM, from /proc/meminfo, whose unit is KiB."""
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * KiB
    raise ConfigError("/proc/meminfo does not say how much memory there is; give --device-memory")


def _detect_gpu(root: Path, environ: Mapping[str, str]) -> DeviceSpec | None:
    """Return the first GPU that the process may see, or None."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if visible is None else visible.split(",")[0].strip()
    if chosen in ("", "-1"):
        return None
    return _ask_nvidia_smi(chosen) or _read_driver(root)


def _ask_nvidia_smi(chosen: str | None) -> DeviceSpec | None:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    if chosen is not None:
        command.append(f"--id={chosen}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        name, memory_mib, version = answer.splitlines()[0].rsplit(",", 2)
        memory, capability = int(memory_mib) * MiB, int(version.replace(".", ""))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
    known = _known_gpu(name)
    if known is None:
        source = "this machine (nvidia-smi)"
        return DeviceSpec(name.strip(), "cuda", memory, 0, None, None, source, capability=capability)
    source = f"this machine (nvidia-smi: {name.strip()})"
    return replace(known, memory_bytes=memory, capability=capability, source=source)


def _read_driver(root: Path) -> DeviceSpec | None:
    """Return a GPU of the catalogue that the driver lists in /proc, by name but without its memory."""
    for gpu in matches(root / "proc/driver/nvidia/gpus", "*"):
        for line in read_lines(gpu / "information"):
            if line.startswith("Model:"):
                name = line.split(":", 1)[1].strip()
                known = _known_gpu(name)
                return known and replace(known, source=f"this machine (driver: {name}; memory by catalogue)")
    return None


def _known_gpu(name: str) -> DeviceSpec | None:
    """Return the catalogue's entry for a product name such as `NVIDIA A100-SXM4-80GB`."""
    words = name.lower().replace("-", " ").split()
    for key, spec in CATALOGUE.items():
        product, size = key.split("-")
        if product == "a100" and size not in words:
            continue  # the A100 also exists with 40 GB
        if product in words or product.replace("rtx", "") in words:
            return spec
    return None


def _torch_supports_cuda() -> bool:
    """Return whether the installed torch was built with CUDA, by its version alone: importing it takes seconds."""
    try:
        return "+cpu" not in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return True
