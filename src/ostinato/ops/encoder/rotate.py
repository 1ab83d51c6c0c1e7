"""rotate: rotary position embedding of heads that go into no cache, in the half-split layout (Su et al. 2021)."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] with element i of every head rotated with element `half + i` by the angle of
    frequency i; elements from `2 * half` on pass through. `angles` [2, tokens, half] float32, as `rotary_angles` and
    `axial_angles` give them. -> like `x`"""
    half = angles.shape[-1]
    cos, sin = angles.unsqueeze(2)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
