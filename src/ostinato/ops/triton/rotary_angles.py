"""rotary_angles on a GPU: `axial_angles` of one axis."""

from __future__ import annotations

import torch

from ostinato.ops.triton.axial_angles import angles_of


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> torch.Tensor:
    """As `ops.rotary_angles`."""
    return angles_of(positions, positions.stride(0), None, frequencies, scaling)
