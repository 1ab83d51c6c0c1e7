"""rotary_angles on a GPU: `axial_angles` of one axis."""

from __future__ import annotations

import torch

from ostinato.ops.triton.axial_angles import angles_of


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute `ops.rotary_angles`; its reference documents arguments and result."""
    return angles_of(positions, positions.stride(0), None, frequencies, scaling)
