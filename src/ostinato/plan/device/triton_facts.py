"""Whether Triton kernels run on a device. Nothing is imported: Triton takes a second to load."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

LEAST_CAPABILITY = 80
"""The first with bfloat16."""

LEAST_VERSION = (3, 5)


@dataclass(frozen=True)
class TritonFacts:
    """`reason` says why kernels of Triton run, or what is missing and how to get it."""

    is_usable: bool
    reason: str


FOR_GPUS = TritonFacts(False, "Triton kernels are for NVIDIA GPUs")
"""Of a CPU."""

BROUGHT_BY_TORCH = TritonFacts(True, "torch for CUDA brings Triton")
"""Of a GPU that need not be here."""


def detect_triton(capability: int | None) -> TritonFacts:
    """Of a GPU of this machine: what is installed, and whether the GPU is new enough."""
    if capability is not None and capability < LEAST_CAPABILITY:
        return TritonFacts(
            False, f"Triton kernels need compute capability 8.0, and this GPU has {capability // 10}.{capability % 10}"
        )
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return TritonFacts(False, "Triton is not installed: pip install triton")
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_VERSION:
        return TritonFacts(False, f"Triton {version} is installed, and kernels need 3.5: pip install -U triton")
    return TritonFacts(True, f"Triton {version} is installed")
