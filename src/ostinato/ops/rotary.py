"""rotary: rotary position embedding, in the half-split layout of Hugging Face checkpoints (Su et al. 2021)."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first `2 * half` elements of every head; the rest pass through.

    `x` [tokens, heads, head_dim]; `cos` and `sin` [tokens, half], float32. Element i is rotated with element
    `half + i` by the angle of frequency i. -> [tokens, heads, head_dim] in the dtype of `x`.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
