"""axial_angles: rotation angles of tokens whose positions have several axes.

Examples are text with images in time, height and width (M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1) and patches in
rows and columns.
"""

from __future__ import annotations

import torch


def axial_angles(positions: torch.Tensor, axes: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return cosine and sine of each angle, times `scaling`.

    Angle i is the token's position `axes[i]` times `frequencies[i]`. `positions` [tokens, axes] int64, `axes` [half]
    int64, `frequencies` [half] float32 -> [2, tokens, half] float32, the cosines first.
    """
    angles = positions.index_select(1, axes).float() * frequencies
    return torch.stack((angles.cos(), angles.sin())).mul_(scaling)
