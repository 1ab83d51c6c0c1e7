"""rotary_angles: rotation angles of each token's heads (Su et al. 2021), computed once for all layers."""

from __future__ import annotations

import torch


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return cosine and sine of position times frequency, each times `scaling`.

    `positions` [tokens] int64, `frequencies` [half] float32 -> [2, tokens, half] float32, the cosines first.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.stack((angles.cos(), angles.sin())).mul_(scaling)
