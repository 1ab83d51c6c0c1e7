"""gated_rms_norm: the norm after a recurrence, with a gate before or after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool = False,
    gate_is_sigmoid: bool = False,
) -> torch.Tensor:
    """Normalise each group of `group_size` channels by its root mean square, with a gate.

    The gate is silu(`gate`), or sigmoid(`gate`) if `gate_is_sigmoid` (Kimi Linear). Computed in float32.

    `x` and `gate` [tokens, size], `weight` [size], or [group_size] for all groups -> [tokens, size] in the dtype of
    `gate`. The gate multiplies the input of the norm, or with `norm_before_gate` its output. Without a weight there is
    no norm, only the gate.
    """
    by = gate.float().sigmoid() if gate_is_sigmoid else F.silu(gate.float())
    if weight is None:
        return (x.float() * by).to(gate.dtype)
    assert group_size is not None, "a norm averages over groups of channels"
    y = x.float() if norm_before_gate else x.float() * by
    grouped = y.unflatten(-1, (-1, group_size))
    weights = weight.float().unflatten(0, (-1, group_size))
    y = (F.rms_norm(grouped, (group_size,), None, eps) * weights).flatten(-2)
    return (y * by if norm_before_gate else y).to(gate.dtype)
