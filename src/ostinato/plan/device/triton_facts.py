"""Detection of whether Triton kernels run on a device. Nothing is imported: Triton takes a second to load."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

MIN_CAPABILITY = 80
"""The first compute capability with bfloat16."""

MIN_VERSION = (3, 5)


@dataclass(frozen=True)
class TritonFacts:
    """Availability of Triton kernels. `reason` says why they run, or what is missing and how to get it."""

    is_usable: bool
    reason: str


FOR_GPUS = TritonFacts(False, "Triton kernels are for NVIDIA GPUs")
"""Facts for a CPU."""

BROUGHT_BY_TORCH = TritonFacts(True, "torch for CUDA brings Triton")
"""Facts for a GPU that need not be present."""


def detect_triton(capability: int | None, environ: Mapping[str, str]) -> TritonFacts:
    """Return whether Triton runs on a GPU of this machine: what is installed, and whether the GPU is new enough."""
    if capability is not None and capability < MIN_CAPABILITY:
        return TritonFacts(
            False, f"Triton kernels need compute capability 8.0, and this GPU has {capability // 10}.{capability % 10}"
        )
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return TritonFacts(False, "Triton is not installed: pip install triton")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return TritonFacts(False, f"Triton {version} is installed, and kernels need 3.5: pip install -U triton")
    lacking = missing_for_launcher(environ)
    if lacking is not None:
        return TritonFacts(False, f"Triton builds its launcher when it starts, and there is no {lacking}")
    return TritonFacts(True, f"Triton {version} is installed")


def missing_for_launcher(environ: Mapping[str, str]) -> str | None:
    """Return what is missing to compile the C code with which Triton starts kernels, and how to get it; or None."""
    path = environ.get("PATH")
    if "CC" not in environ and not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return "C compiler: apt install gcc, or set CC"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if headers.exists() else f"{headers}: apt install python3-dev"
