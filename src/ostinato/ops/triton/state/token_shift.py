"""token_shift: the convolution's kernels, with a token's predecessor as the output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.ops.triton.state.causal_conv1d import convolve


def token_shift(
    x: torch.Tensor,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Compute `ops.token_shift`; its reference documents arguments and result."""
    return convolve(x, None, None, states, row_starts, read_slots, write_slots, num_decode_rows, checkpoints)
