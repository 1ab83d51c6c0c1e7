"""Dequantization of the tensors of a GGUF file."""

from __future__ import annotations

import torch

from ostinato.formats.gguf.types import BlockType
from ostinato.ops.blocks import dequantize as block_ops

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are not blocks."""


def dequantize(kind: BlockType, blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize `blocks` [..., bytes of a row] uint8 to [..., weights of a row] float32."""
    dtype = PLAIN.get(kind.name)
    return block_ops.dequantize(kind.name, blocks) if dtype is None else blocks.view(dtype).float()
