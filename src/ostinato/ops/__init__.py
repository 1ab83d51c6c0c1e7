"""The kernels: one function per file, its torch reference being the definition.

Layers reach kernels only through an `Ops` that they are given, so one place decides what runs, and one place sees
every call: there a recorder can note them (`recording.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.ops import (
    activation,
    attention,
    causal_conv1d,
    gated_rms_norm,
    linear,
    moe,
    rms_norm,
    rotary,
    ssd_scan,
    state_update,
    token_shift,
)
from ostinato.ops.recording import Kernel, Tap

IMPLEMENTATIONS: dict[str, dict[str, Kernel]] = {
    "activation": {"reference": activation.reference},
    "attention": {"reference": attention.reference},
    "causal_conv1d": {"reference": causal_conv1d.reference},
    "gated_rms_norm": {"reference": gated_rms_norm.reference},
    "linear": {"reference": linear.reference},
    "moe": {"reference": moe.reference},
    "rms_norm": {"reference": rms_norm.reference},
    "rotary": {"reference": rotary.reference},
    "ssd_scan": {"reference": ssd_scan.reference},
    "state_update": {"reference": state_update.reference},
    "token_shift": {"reference": token_shift.reference},
}


@dataclass(frozen=True)
class Ops:
    """The chosen implementation of every kernel. The file of the same name documents each function.

    `tap` is where a recorder listens; parts of a layer that depend on which rows a step has go through its `split`.
    """

    activation: Kernel
    attention: Kernel
    causal_conv1d: Kernel
    gated_rms_norm: Kernel
    linear: Kernel
    moe: Kernel
    rms_norm: Kernel
    rotary: Kernel
    ssd_scan: Kernel
    state_update: Kernel
    token_shift: Kernel
    tap: Tap


def select_ops(choices: Mapping[str, str]) -> Ops:
    """The kernels that the plan chose: `choices` maps a kernel's name to `reference`, `native` or `triton`.

    A kernel that is not named (the model does not use it) is its reference.
    """
    tap = Tap()
    chosen = {name: made[choices.get(name, "reference")] for name, made in IMPLEMENTATIONS.items()}
    return Ops(**{name: tap.wrap(name, kernel) for name, kernel in chosen.items()}, tap=tap)
