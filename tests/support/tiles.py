"""What an instruction of matrix units computes, by the manual's formula."""

from __future__ import annotations

import numpy as np
import torch

SIDE, DEPTH = 16, 32
LEAST_NORMAL = np.float32(2.0**-126)


def pairs(columns: torch.Tensor) -> torch.Tensor:
    """[32, 16] -> [16, 16, 2]: two rows beside each other, as the second operand lies."""
    return columns.view(SIDE, 2, SIDE).transpose(1, 2).contiguous()


def tile_product(left: torch.Tensor, right: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """sums [16, 16] + left [16, 32] right [32, 16], as TDPBF16PS adds (Intel's manual): even and odd inputs apart, from
    zero on, in ascending order, each product and sum rounded once to float32; then both, and the result to `sums`.
    Denormals are zero wherever they come up."""
    a, b = (flushed(each.float().numpy()) for each in (left, right))
    total = np.zeros((2, SIDE, SIDE), np.float32)
    for k in range(DEPTH):
        product = np.multiply.outer(a[:, k].astype(np.longdouble), b[k].astype(np.longdouble))
        total[k % 2] = flushed((product + total[k % 2].astype(np.longdouble)).astype(np.float32))
    return torch.from_numpy(flushed(flushed(sums.numpy()) + flushed(total[0] + total[1])))


def flushed(values: np.ndarray) -> np.ndarray:
    """With zero, of the same sign, in place of each denormal."""
    return np.where(np.abs(values) < LEAST_NORMAL, np.copysign(np.float32(0), values), values)
