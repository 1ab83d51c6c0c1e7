"""Parts of a model that piecewise graphs leave out: they run anew in each replay, with the step of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ostinato.graphs.buffers import Inputs
from ostinato.graphs.recorder import check_captured_step
from ostinato.ops.recording import Kernel


def left_out(
    function: Kernel,
    tensors: tuple[torch.Tensor, ...],
    others: tuple[Any, ...],
    out: torch.Tensor,
    captured: Inputs,
) -> Callable[[Inputs], None]:
    """`function` on the real tokens alone, with the step of now in place of the captured one; zeros for padding.

    `tensors` and `out` have one entry per padded token in their first dimension.
    """
    check_captured_step(others, captured)

    def play(step: Inputs) -> None:
        count = step.length
        now = [step if other is captured else other for other in others]
        out[:count] = function(*(tensor[:count] for tensor in tensors), *now)
        out[count:] = 0

    return play
