"""Kernels: which implementation of each operation runs, and whether a graph can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ostinato.errors import ConfigError, Remedy
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.model import ModelSpec

Backend = Literal["tape", "cuda"]

READS_ON_HOST = frozenset(
    {
        ("attention", "reference"),
        ("causal_conv1d", "reference"),
        ("moe", "reference"),
        ("ssd_scan", "reference"),
        ("token_shift", "reference"),
    }
)
"""(operation, implementation) that look at values on the host while they run. A tape calls them anew in each replay; a
CUDA graph cannot hold them."""

NATIVE = frozenset(
    {
        "attention",
        "axial_angles",
        "causal_conv1d",
        "concat",
        "embedding",
        "encoder_attention",
        "gated_rms_norm",
        "inject_media",
        "layer_norm",
        "linear",
        "moe",
        "rms_norm",
        "rotary",
        "rotary_angles",
        "rotate",
        "route",
        "sample",
        "ssd_scan",
        "state_update",
        "token_shift",
        "weighted_embedding",
    }
)
"""Operations that the extension has a kernel for."""

KernelSetting = Literal["auto", "native", "reference"]

ENCODER_ONLY = frozenset({"encoder_attention", "layer_norm", "rotate", "weighted_embedding"})
"""Operations that a vision encoder alone calls."""

PREFILL_ONLY = ENCODER_ONLY | {"ssd_scan"}
"""Operations that a step of decode rows alone does not call."""

SPLITS = {
    "attention": ("attention",),
    "state": ("causal_conv1d", "ssd_scan", "state_update", "token_shift"),
    "moe": ("moe",),
}
"""Parts of a model that piecewise graphs may leave out, and the operations in each."""


@dataclass(frozen=True)
class KernelChoice:
    """`implementation` is `reference`, `native` or `triton`; `capturable`: whether a graph can hold it."""

    implementation: str
    reason: str
    capturable: bool = True


def backend_of(device_kind: str) -> Backend:
    """How steps are captured on a device of this kind."""
    return "cuda" if device_kind == "cuda" else "tape"


def choose_kernels(
    model: ModelSpec, device: DeviceSpec, setting: KernelSetting = "auto", deterministic: bool = False
) -> dict[str, KernelChoice]:
    """The implementation of each operation that the model or its drafter calls, and of sampling, which no graph has.

    ConfigError if `setting` is `native`, or `deterministic` is wanted, and an operation has no native kernel here:
    torch adds in another order for other numbers of tokens.
    """
    ops = dict.fromkeys((*model.ops, *(model.drafter.ops if model.drafter is not None else ()), "sample"))
    choices = {op: _choose(op, device, setting) for op in ops}
    lacking = [op for op, choice in choices.items() if choice.implementation != "native"]
    if setting == "native" and lacking:
        raise ConfigError(
            f"kernels native: there are none for {', '.join(lacking)} here ({choices[lacking[0]].reason})",
            [Remedy("kernels", "auto"), Remedy("kernels", "reference")],
        )
    if deterministic and lacking:
        raise ConfigError(
            f"deterministic needs native kernels, and there are none for {', '.join(lacking)} here "
            f"({choices[lacking[0]].reason})",
            [*([Remedy("kernels", "auto")] if setting == "reference" else []), Remedy("deterministic", False)],
        )
    return choices


def _choose(op: str, device: DeviceSpec, setting: KernelSetting) -> KernelChoice:
    if setting == "reference":
        implementation, reason = "reference", "kernels is reference"
    elif device.native.isa is None:
        implementation, reason = "reference", device.native.reason
    elif op not in NATIVE:
        implementation, reason = "reference", "the extension has no kernel for it"
    else:
        implementation, reason = "native", device.native.reason
    return KernelChoice(implementation, reason, is_capturable(op, implementation, backend_of(device.kind)))


def is_capturable(op: str, implementation: str, backend: Backend) -> bool:
    return backend == "tape" or (op, implementation) not in READS_ON_HOST


def not_capturable_in_decode(kernels: Mapping[str, KernelChoice]) -> list[str]:
    """Operations of a decode step that no graph can hold; where there are any, there are no full graphs."""
    return [op for op, choice in kernels.items() if not choice.capturable and op not in PREFILL_ONLY]


def splits_of(kernels: Mapping[str, KernelChoice]) -> tuple[str, ...]:
    """The parts that piecewise graphs leave out, of `SPLITS`: attention and state, whose work depends on the rows, and
    experts if no graph can hold them."""
    return tuple(
        part
        for part, ops in SPLITS.items()
        if any(op in kernels and (part != "moe" or not kernels[op].capturable) for op in ops)
    )
