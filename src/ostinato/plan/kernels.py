"""Kernels: which implementation of each operation runs, and whether a graph can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ostinato.errors import ConfigError, Remedy
from ostinato.ops.facts import BETWEEN_RANKS, OPERATIONS, Backend, Implementation, Limited, called_by, parts
from ostinato.ops.launches.table import Launch
from ostinato.plan.device.catalogue import DeviceSpec
from ostinato.plan.device.instruction_sets import has_matrix_units, multiplies_all_in_integers, multiplies_integers
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import BlockQuantization

KernelSetting = Literal["auto", "native", "triton", "reference"]


@dataclass(frozen=True)
class KernelChoice:
    """`implementation` is `reference`, `native` or `triton`; `capturable`: whether a graph can hold it."""

    implementation: str
    reason: str
    capturable: bool = True
    launches: tuple[Launch, ...] = ()
    """Of a Triton kernel: what the plan's steps start, each distinct launch once."""
    launches_per_call: int = 1
    """In a decode step of one row. Of a reference, which is as many operations of torch as it needs, one is counted."""


def backend_of(device_kind: str) -> Backend:
    """How steps are captured on a device of this kind."""
    return "cuda" if device_kind == "cuda" else "tape"


def choose_kernels(
    model: ModelSpec, device: DeviceSpec, setting: KernelSetting = "auto", deterministic: bool = False
) -> dict[str, KernelChoice]:
    """The implementation of each operation that the model or its drafter calls, and of sampling, which no graph has.

    ConfigError if `setting` is `native` or `triton` and an operation has no such kernel here; or if `deterministic` is
    wanted and one has no native kernel: others may add in another order for other numbers of tokens. What ranks give
    each other is no kernel, and never asked for; with `deterministic` they add in their order.
    """
    ops = dict.fromkeys((*model.ops, *(model.drafter.ops if model.drafter is not None else ()), "sample"))
    if model.gathers_inputs:
        ops["gather_inputs"] = None
    formats = _block_formats(model)
    sizes = _limited_sizes(model)
    choices = {op: _choose(op, device, setting, deterministic, formats, sizes) for op in ops}
    if setting in ("native", "triton"):
        lacking = [op for op, choice in choices.items() if choice.implementation != setting and op not in BETWEEN_RANKS]
        if lacking:
            raise ConfigError(
                f"kernels {setting}: there are none for {', '.join(lacking)} here ({choices[lacking[0]].reason})",
                [Remedy("kernels", "auto"), Remedy("kernels", "reference")],
            )
    lacking = [op for op, choice in choices.items() if choice.implementation != "native" and op not in BETWEEN_RANKS]
    if deterministic and lacking:
        raise ConfigError(
            f"deterministic needs native kernels, and there are none for {', '.join(lacking)} here "
            f"({choices[lacking[0]].reason})",
            [*([Remedy("kernels", "auto")] if setting == "reference" else []), Remedy("deterministic", False)],
        )
    return choices


def _block_formats(model: ModelSpec) -> frozenset[str]:
    """Of the weights in blocks, a draft model's too."""
    chosen = model.quantizations
    return frozenset().union(*(each.used for each in chosen if isinstance(each, BlockQuantization)))


def _limited_sizes(model: ModelSpec) -> dict[Limited, int]:
    """The most that the model has of each, a draft model's too."""
    draft = None if model.drafter is None else model.drafter.model
    layers = [*model.layers, *(() if draft is None else draft.layers)]
    return {
        "elements of a head": max((each.attention.head_dim for each in layers if each.attention), default=0),
        "taps of a convolution": max((each.mixer.sizes.get("width", 0) for each in layers if each.mixer), default=0),
    }


def _choose(
    op: str,
    device: DeviceSpec,
    setting: KernelSetting,
    deterministic: bool,
    formats: frozenset[str],
    sizes: Mapping[Limited, int],
) -> KernelChoice:
    if op in BETWEEN_RANKS:
        implementation, reason = "reference", "ranks wait for each other in it"
    elif setting == "reference":
        implementation, reason = "reference", "kernels is reference"
    elif setting == "triton" or (setting == "auto" and device.kind == "cuda"):
        if not device.triton.is_usable:
            implementation, reason = "reference", device.triton.reason
        elif OPERATIONS[op].triton is None:
            implementation, reason = "reference", "there is no Triton kernel for it"
        else:
            implementation, reason = "triton", device.triton.reason
    elif device.native.isa is None:
        implementation, reason = "reference", device.native.reason
    elif OPERATIONS[op].native is None:
        implementation, reason = "reference", "the extension has no kernel for it"
    else:
        implementation, reason = "native", device.native.reason
    facts = OPERATIONS[op].implementation(implementation)
    lacking = [] if facts is None else sorted(formats - facts.block_formats)
    if lacking and OPERATIONS[op].reference.block_formats:
        why = f"its {implementation} kernel reads no weights in blocks of {', '.join(lacking)}"
        implementation, facts, reason = "reference", OPERATIONS[op].reference, why
    assert facts is not None, "what is chosen is there"
    for name, most in facts.most.items():
        if sizes[name] > most:
            why = f"its {implementation} kernel takes {most} {name}, and the model has {sizes[name]}"
            implementation, facts, reason = "reference", OPERATIONS[op].reference, why
    if device.native.isa is not None:
        reason = "; ".join([reason, *_instructions(facts, device.native.isa, deterministic)])
    return KernelChoice(implementation, reason, facts.is_capturable(backend_of(device.kind)))


def _instructions(facts: Implementation, isa: str, deterministic: bool) -> list[str]:
    """What products are computed with, where that is more than vectors of floats; in a fixed order, without what."""
    used = {}
    if facts.matrix_units is not None and has_matrix_units(isa):
        used["matrix units"] = f"on matrix units: {facts.matrix_units}"
    if facts.in_integers is not None and multiplies_integers(isa):
        few_or_all = facts.in_integers if multiplies_all_in_integers(isa) else facts.few_in_integers
        used["16-bit integers"] = f"in 16-bit integers: {few_or_all}"
    if used and deterministic and facts.deterministic:
        return [f"in a fixed order, without {' and '.join(used)}"]
    return list(used.values())


def ops_of(kernels: Mapping[str, KernelChoice], implementation: str) -> list[str]:
    """The operations that run in this implementation."""
    return [op for op, choice in kernels.items() if choice.implementation == implementation]


def not_capturable_in_decode(kernels: Mapping[str, KernelChoice]) -> list[str]:
    """Operations of a decode step that no graph can hold; where there are any, there are no full graphs."""
    not_called = called_by("prefill", "encoder")
    return [op for op, choice in kernels.items() if not choice.capturable and op not in not_called]


def splits_of(kernels: Mapping[str, KernelChoice]) -> tuple[str, ...]:
    """The parts that piecewise graphs leave out: attention and state, whose work depends on the rows, and experts if no
    graph can hold them."""
    return tuple(
        part
        for part, ops in parts().items()
        if any(op in kernels and (part != "moe" or not kernels[op].capturable) for op in ops)
    )
