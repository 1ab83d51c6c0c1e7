"""Choice of the implementation of each operation, and whether a graph can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ostinato.errors import ConfigError, Remedy
from ostinato.ops.launch_tables.launch import Launch
from ostinato.ops.operations import COLLECTIVE_OPS, OPERATIONS, GraphBackend, Limited, ops_called_by, parts
from ostinato.ops.ukernels import ROWS_OF, S8
from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.device.kernel_support import features
from ostinato.plan.model import ModelSpec
from ostinato.plan.quantization import BlockQuantization
from ostinato.plan.ukernels import products_of, rows_of_model

KernelSetting = Literal["auto", "native", "triton", "reference"]


@dataclass(frozen=True)
class KernelChoice:
    """Chosen implementation: `reference`, `native` or `triton`. `capturable` is true if a graph can hold it."""

    implementation: str
    reason: str
    capturable: bool = True
    launches: tuple[Launch, ...] = ()
    """Launches of a Triton kernel in the plan's steps, each distinct launch once."""
    launches_per_call: int = 1
    """Launches in a decode step of one row. A reference counts as one, although it is several operations of torch."""
    ukernels: tuple[str, ...] = ()
    """Micro-kernels that a native implementation may choose for this model, in the order of `ops/ukernels.py`."""


def graph_backend_of(device_kind: str) -> GraphBackend:
    """Return the backend that captures steps on a device of this kind."""
    return "cuda" if device_kind == "cuda" else "tape"


def choose_kernels(
    model: ModelSpec,
    device: DeviceSpec,
    setting: KernelSetting = "auto",
    deterministic: bool = False,
    *,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
) -> dict[str, KernelChoice]:
    """Return the implementation of each operation that the model or its drafter calls, and of sampling.

    Sampling is in no graph. ConfigError if `setting` is `native` or `triton` and an operation has no such kernel here;
    or if `deterministic` is set and an operation has no native kernel, since others may add in another order for other
    numbers of tokens. `dtype` is that of activations, None: the model's; `kv_cache_dtype` that of keys and values,
    None: the same. Communication between ranks is no kernel and never required to be one; with `deterministic` ranks
    add in their order.
    """
    ops = dict.fromkeys((*model.ops, *(model.drafter.ops if model.drafter is not None else ()), "sample"))
    if model.gathers_inputs:
        ops["gather_act_order"] = None
    formats = _block_formats(model)
    sizes = _limited_sizes(model)
    choices = {op: _choose(op, device, setting, formats, sizes) for op in ops}
    if device.native.isa is not None:
        rows = rows_of_model(model, dtype or model.dtype, device.native.isa, deterministic, kv_cache_dtype)
        for op in choices.keys() & rows.keys():
            if choices[op].implementation == "native":
                names = tuple(dict.fromkeys(row.name for row in rows[op]))
                order = "in a fixed order by" if deterministic else "by"
                reason = f"{choices[op].reason}; {order} {', '.join(names)}"
                choices[op] = replace(choices[op], reason=reason, ukernels=names)
        if any(each.lhs == "int8" for each in products_of(model)) and choices["linear"].implementation == "native":
            _check_int8_rows(device.native.isa)
    if setting in ("native", "triton"):
        lacking = [
            op for op, choice in choices.items() if choice.implementation != setting and op not in COLLECTIVE_OPS
        ]
        if lacking:
            raise ConfigError(
                f"kernels {setting}: there are none for {', '.join(lacking)} here ({choices[lacking[0]].reason})",
                [Remedy("kernels", "auto"), Remedy("kernels", "reference")],
            )
    lacking = [op for op, choice in choices.items() if choice.implementation != "native" and op not in COLLECTIVE_OPS]
    if deterministic and lacking:
        raise ConfigError(
            f"deterministic needs native kernels, and there are none for {', '.join(lacking)} here "
            f"({choices[lacking[0]].reason})",
            [*([Remedy("kernels", "auto")] if setting == "reference" else []), Remedy("deterministic", False)],
        )
    return choices


def _check_int8_rows(isa: str) -> None:
    """Raise ConfigError if a module has no micro-kernel for activations in 8 bits."""
    rows = [row for row in ROWS_OF["linear"] if row.lhs == S8]
    if any(row.runs_on(features(isa)) for row in rows):
        return
    lacking = sorted({name for row in rows for name in row.modules.needs - {*features(isa)}})
    raise ConfigError(
        f"activation_dtype int8: the kernels of this CPU ({isa}) have no products of 8-bit tokens, which need one of "
        f"{', '.join(lacking)}; use activation_dtype auto",
        [Remedy("activation_dtype", "auto")],
    )


def _block_formats(model: ModelSpec) -> frozenset[str]:
    """Return the formats of the weights in blocks, including a draft model's."""
    chosen = model.quantizations
    return frozenset().union(
        *(quantization.used for quantization in chosen if isinstance(quantization, BlockQuantization))
    )


def _limited_sizes(model: ModelSpec) -> dict[Limited, int]:
    """Return the largest size of each limited kind in the model and a draft model."""
    draft = None if model.drafter is None else model.drafter.model
    layers = [*model.layers, *(() if draft is None else draft.layers)]
    return {
        "elements of a head": max((layer.attention.head_dim for layer in layers if layer.attention), default=0),
        "taps of a convolution": max((layer.mixer.sizes.get("width", 0) for layer in layers if layer.mixer), default=0),
    }


def _choose(
    op: str, device: DeviceSpec, setting: KernelSetting, formats: frozenset[str], sizes: Mapping[Limited, int]
) -> KernelChoice:
    if op in COLLECTIVE_OPS:
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
    return KernelChoice(implementation, reason, facts.is_capturable(graph_backend_of(device.kind)))


def ops_of(kernels: Mapping[str, KernelChoice], implementation: str) -> list[str]:
    """Return the operations that run in this implementation."""
    return [op for op, choice in kernels.items() if choice.implementation == implementation]


def not_capturable_in_decode(kernels: Mapping[str, KernelChoice]) -> list[str]:
    """Return the operations of a decode step that no graph can hold. If there are any, there are no full graphs."""
    not_called = ops_called_by("prefill", "encoder")
    return [op for op, choice in kernels.items() if not choice.capturable and op not in not_called]


def splits_of(kernels: Mapping[str, KernelChoice]) -> tuple[str, ...]:
    """Return the parts that piecewise graphs leave out: attention, state, and experts if no graph can hold them."""
    return tuple(
        part
        for part, ops in parts().items()
        if any(op in kernels and (part != "moe" or not kernels[op].capturable) for op in ops)
    )
