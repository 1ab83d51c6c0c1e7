"""rotate: rotary position embedding of heads that are not cached, in the half-split layout (Su et al. 2021)."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate element i of every head of `x` with element `half + i` by the angle of frequency i.

    `x` [tokens, heads, head_dim]; elements from `2 * half` on pass through. `rotary_angles_launches` [2, tokens, half] float32, as
    returned by `rotary_angles` and `axial_angles`. -> like `x`.
    """
    half = angles.shape[-1]
    cos, sin = angles.unsqueeze(2)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
