"""Start of Triton kernels. Every launch passes `run`, so that a check can collect launches instead of running them.

Rules for a wrapper in `ops/triton/NAME.py`:

- `NAME(...)` has the parameters of the reference, and reads sizes from shapes, never a value from a device: the same
  call works on tensors of the device `meta`, on which checks collect launches, and inside a graph's capture.
- Numbers that change from step to step must be in tensors, since a graph keeps all others. The grid covers the padded
  step; the kernel finds the padding from the step's tensors.
- Its blocks come from the launch table: `launches.NAME(sizes, capability=launcher.capability(x))`.
- It starts kernels by `launcher.run(kernel, grid, launch, argument=...)`, arguments by name. Strides are arguments:
  layers pass views. Offsets that can pass 2^31 elements (slots, blocks) are computed in int64.

In a kernel, for the interpreter too: a scalar in a mask is `spread` before it is compared; float32 is rounded to
bfloat16 by `to_dtype` and not by `.to`; operands of `tl.dot` pass through `dot_operand`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ostinato.ops.launches.table import Launch

ASSUMED_CAPABILITY = 90
"""Compute capability without a GPU: in the interpreter, and on tensors without memory."""

MAX_BLOCKS = 65535
"""Largest second and third dimension of a grid."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if kernels run on the CPU, in Triton's interpreter."""

IS_INTERPRETED = tl.constexpr(INTERPRETED)


def run(kernel: Any, grid: tuple[int, ...], launch: Launch, **arguments: Any) -> None:
    """Start `kernel` with the options of `launch` on `grid` blocks; an empty grid starts nothing.

    The first number of the grid may be large, others at most `MAX_BLOCKS`. `arguments` are all of the kernel's
    arguments except the blocks of `launch`.
    """
    assert kernel.__name__ == launch.kernel, f"{kernel.__name__} is started by the launch of {launch.kernel}"
    assert max(grid[1:], default=0) <= MAX_BLOCKS, f"{launch.kernel} has a grid of {grid}"
    if 0 not in grid:
        kernel[grid](**arguments, **launch.blocks, **options_of(launch))


def options_of(launch: Launch) -> dict[str, Any]:
    """Return the options for Triton's compiler."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    return options if launch.registers is None else options | {"maxnreg": launch.registers}


def capability(tensor: torch.Tensor) -> int:
    """Return the compute capability of the GPU that holds `tensor`, 90 for 9.0."""
    return _capability(tensor.device.index) if tensor.is_cuda else ASSUMED_CAPABILITY


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `values` from the CPU's memory to `device`, without waiting.

    A copy from memory that is not pinned would wait until the device has finished all earlier work.
    """
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


@lru_cache
def _capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """Round `x` to nearest in `dtype`.

    Only the interpreter truncates float32 to bfloat16. NaN stays NaN.
    """
    if IS_INTERPRETED and dtype == tl.bfloat16 and x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot_operand(x):
    """Return `x` as an operand of `tl.dot`.

    It is unchanged, but float32 for bfloat16 in the interpreter, which multiplies bfloat16 wrongly.
    """
    if IS_INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def spread(scalar, like):
    """Return `scalar` for each element of `like`, in integers.

    The interpreter accepts no comparison of scalars as part of a mask.
    """
    return scalar + tl.zeros_like(like)
