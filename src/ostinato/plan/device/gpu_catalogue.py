"""DeviceSpec: the plan's facts about a device; and a catalogue of GPUs that need not be present."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.plan.device.kernel_support import BROUGHT_BY_TORCH, FOR_GPUS, NOT_THIS_CPU, NativeFacts, TritonFacts
from ostinato.plan.device.measured_rates import Rates
from ostinato.units import MiB


@dataclass(frozen=True)
class DeviceSpec:
    """Facts about a device. `kind` is `cpu` or `cuda`. Rates that are neither measured nor published are None.

    `peak_rates` are dense matmuls in FLOP/s by dtype; `bandwidth` is in bytes/s; `cores` are the cores that the process
    may use, or a GPU's multiprocessors; `source` says where all this comes from; `native` describes the native kernels
    for it; `rates` are the measured rates of its kernels, with some threads and dtypes. `capability` is a GPU's compute
    capability, ten times the major number plus the minor one (90 for 9.0), None if unknown; `triton` says whether
    Triton kernels run on it.
    """

    name: str
    kind: str
    memory_bytes: int
    cores: int
    bandwidth: float | None
    peak_rates: dict[str, float] | None
    source: str
    native: NativeFacts = NOT_THIS_CPU
    rates: tuple[Rates, ...] = ()
    capability: int | None = None
    triton: TritonFacts = FOR_GPUS


def _gpu(
    name: str, capability: int, memory_mib: int, cores: int, bandwidth: float, half_rate: float, float32_rate: float
) -> DeviceSpec:
    rates = {"bfloat16": half_rate, "float16": half_rate, "float32": float32_rate}
    return DeviceSpec(
        name,
        "cuda",
        memory_mib * MiB,
        cores,
        bandwidth,
        rates,
        "catalogue",
        capability=capability,
        triton=BROUGHT_BY_TORCH,
    )


CATALOGUE = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-80gb", 80, 81920, 108, 2.039e12, 312e12, 19.5e12),
        _gpu("h100-80gb", 90, 81559, 132, 3.35e12, 989e12, 67e12),
        _gpu("h200-141gb", 90, 143771, 132, 4.8e12, 989e12, 67e12),
        _gpu("b200-192gb", 100, 183359, 148, 8.0e12, 2250e12, 75e12),
        _gpu("l4-24gb", 89, 23034, 58, 0.3e12, 121e12, 30.3e12),
        _gpu("l40s-48gb", 89, 46068, 142, 0.864e12, 362e12, 91.6e12),
        _gpu("rtx4090-24gb", 89, 24564, 128, 1.008e12, 165e12, 82.6e12),
    )
}
"""GPUs by name.

Memory is the amount that the driver reports, which is less than the name says. The rates are those of the vendor's data
sheets (the SXM variants), without sparsity, sums in float32.
"""

DEVICE_NAMES = ("cpu", *CATALOGUE)
"""Names that `find_device` knows; `cpu` is the CPU of this machine."""
