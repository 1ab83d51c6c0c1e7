"""Quantisers of weights while they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ostinato.ops import int8
from ostinato.ops.blocks import int4
from ostinato.ops.blocks.dequantize import pack_float8
from ostinato.ops.blocks.formats import BLOCK_FORMATS

QUANTIZABLE_FORMATS = ("Q8_0", "int4_g32", "int4_g64", "int4_g128", "fp8_g32", "fp8_g64", "fp8_g128")
"""Formats of blocks that weights can be quantised to."""


@dataclass(frozen=True)
class WeightQuantizers:
    """Quantisation functions, torch's by default."""

    int8: int8.Quantize = int8.quantize_int8_into
    int4: int4.Quantize = int4.quantize_int4_into

    def quantize_blocks(self, values: torch.Tensor, weight: torch.Tensor, name: str) -> None:
        """Write `values` [rows, in] into `weight` in blocks of the format `name`, one of `QUANTIZABLE_FORMATS`.

        `weight` is uint8 [rows, bytes of a row].
        """
        elements = BLOCK_FORMATS[name].elements
        if name.startswith("fp8"):
            weight.copy_(_float8(values.float(), elements))
            return
        if name != "Q8_0":
            self.int4(values, weight, elements)
            return
        whole = torch.empty(values.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(len(values), values.shape[1] // elements, device=weight.device)
        self.int8(values, whole, scale, elements)
        parts = (scale.half().unsqueeze(-1).view(torch.uint8), whole.view(torch.uint8).unflatten(1, (-1, elements)))
        weight.copy_(torch.cat(parts, dim=2).flatten(1))


def _float8(values: torch.Tensor, elements: int) -> torch.Tensor:
    """Return blocks of `values` float32 [rows, in], scaled so that a block's largest value is the largest of float8."""
    groups = values.unflatten(1, (-1, elements))
    scale = groups.abs().amax(dim=2) / torch.finfo(torch.float8_e4m3fn).max
    small = groups / torch.where(scale > 0, scale, 1.0).unsqueeze(2)
    return pack_float8(small.to(torch.float8_e4m3fn).flatten(1), scale)


BY_TORCH = WeightQuantizers()


def native_quantizers(extension: Any) -> WeightQuantizers:
    """Return the quantisers that use an extension's kernels."""
    return WeightQuantizers(int8.native_quantize_int8(extension), int4.native_quantize_int4(extension))
