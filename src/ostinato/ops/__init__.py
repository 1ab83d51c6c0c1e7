"""The kernels: one function per file, its torch reference being the definition.

Layers reach kernels only through an `Ops` that they are given, so one place decides what runs, and one place sees
every call: there a recorder can note them (`recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ostinato.ops import (
    attention,
    axial_angles,
    causal_conv1d,
    concat,
    embedding,
    encoder_attention,
    gated_rms_norm,
    inject_media,
    layer_norm,
    linear,
    moe,
    rms_norm,
    rotary,
    rotary_angles,
    rotate,
    route,
    sample,
    ssd_scan,
    state_update,
    token_shift,
    weighted_embedding,
)
from ostinato.ops.native import Lowered, NativeKernel, load_extension
from ostinato.ops.recording import Kernel, Tap

REFERENCES: dict[str, Kernel] = {
    "attention": attention.reference,
    "axial_angles": axial_angles.reference,
    "causal_conv1d": causal_conv1d.reference,
    "concat": concat.reference,
    "embedding": embedding.reference,
    "encoder_attention": encoder_attention.reference,
    "gated_rms_norm": gated_rms_norm.reference,
    "inject_media": inject_media.reference,
    "layer_norm": layer_norm.reference,
    "linear": linear.reference,
    "moe": moe.reference,
    "rms_norm": rms_norm.reference,
    "rotary": rotary.reference,
    "rotary_angles": rotary_angles.reference,
    "rotate": rotate.reference,
    "route": route.reference,
    "sample": sample.reference,
    "ssd_scan": ssd_scan.reference,
    "state_update": state_update.reference,
    "token_shift": token_shift.reference,
    "weighted_embedding": weighted_embedding.reference,
}

NATIVE: dict[str, Callable[..., Lowered]] = {
    "attention": attention.lower,
    "axial_angles": axial_angles.lower,
    "causal_conv1d": causal_conv1d.lower,
    "concat": concat.lower,
    "embedding": embedding.lower,
    "encoder_attention": encoder_attention.lower,
    "gated_rms_norm": gated_rms_norm.lower,
    "inject_media": inject_media.lower,
    "layer_norm": layer_norm.lower,
    "linear": linear.lower,
    "moe": moe.lower,
    "rms_norm": rms_norm.lower,
    "rotary": rotary.lower,
    "rotary_angles": rotary_angles.lower,
    "rotate": rotate.lower,
    "route": route.lower,
    "sample": sample.lower,
    "ssd_scan": ssd_scan.lower,
    "state_update": state_update.lower,
    "token_shift": token_shift.lower,
    "weighted_embedding": weighted_embedding.lower,
}
"""Kernels of the extension, by how their arguments are lowered."""

DETERMINISTIC: dict[str, dict[str, Any]] = {"linear": {"fixed_order": True}, "ssd_scan": {"recurrent": True}}
"""What native kernels are told so that a token's bits depend on nothing but its own row. The others always work so."""


@dataclass(frozen=True)
class Ops:
    """The chosen implementation of every kernel. The file of the same name documents each function.

    `tap` is where a recorder listens; parts of a layer that depend on which rows a step has go through its `split`.
    """

    attention: Kernel
    axial_angles: Kernel
    causal_conv1d: Kernel
    concat: Kernel
    embedding: Kernel
    encoder_attention: Kernel
    gated_rms_norm: Kernel
    inject_media: Kernel
    layer_norm: Kernel
    linear: Kernel
    moe: Kernel
    rms_norm: Kernel
    rotary: Kernel
    rotary_angles: Kernel
    rotate: Kernel
    route: Kernel
    sample: Kernel
    ssd_scan: Kernel
    state_update: Kernel
    token_shift: Kernel
    weighted_embedding: Kernel
    tap: Tap


def select_ops(choices: Mapping[str, str], isa: str | None = None, *, deterministic: bool = False) -> Ops:
    """The kernels that the plan chose: `choices` maps a kernel's name to `reference`, `native` or `triton`.

    A kernel that is not named (the model does not use it) is its reference. `isa` is the instruction set of the
    extension that has the native ones; if `deterministic`, all are native.
    """
    extension = load_extension(isa) if isa is not None else None
    tap = Tap()

    def made(name: str) -> Kernel:
        implementation = choices.get(name, "reference")
        if implementation == "native":
            assert extension is not None, "native kernels are chosen for an instruction set"
            lower = partial(NATIVE[name], **DETERMINISTIC.get(name, {})) if deterministic else NATIVE[name]
            return NativeKernel(extension, name, lower)
        assert name not in choices or not deterministic, "references do not keep the order of their sums"
        return REFERENCES[name]

    return Ops(**{name: tap.wrap(name, made(name)) for name in REFERENCES}, tap=tap)
