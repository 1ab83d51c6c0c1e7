"""Starts Triton kernels. Every launch passes `run`, so that a check can collect launches instead of running them.

How a wrapper is written, in `ops/triton/NAME.py`:

- `NAME(...)` has the parameters of the reference, and reads sizes from shapes, never a value from a device: the same
  call works on tensors of the device `meta`, on which checks collect launches, and inside a graph's capture.
- Numbers that change from step to step must lie in tensors, since a graph keeps all others. The grid covers the padded
  step; what is padding the kernel finds out from the step's tensors.
- Its blocks come from the launch table: `launches.NAME(sizes, capability=launcher.capability(x))`.
- It starts kernels by `launcher.run(kernel, grid, launch, argument=...)`, arguments by name. Strides are arguments:
  layers hand over views. Offsets that can pass 2^31 elements (slots, blocks) are computed in int64.

In a kernel, for the interpreter too: a scalar that takes part in a mask is `spread` before it is compared; float32 is
rounded to bfloat16 by `to_dtype` and not by `.to`; operands of `tl.dot` pass through `dot_operand`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ostinato.ops.launches.table import Launch

ASSUMED_CAPABILITY = 90
"""Where there is no GPU: in the interpreter, and on tensors without memory."""

MOST_BLOCKS = 65535
"""Of a grid's second and third dimension."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU, in Triton's interpreter."""

IS_INTERPRETED = tl.constexpr(INTERPRETED)


def run(kernel: Any, grid: tuple[int, ...], launch: Launch, **arguments: Any) -> None:
    """Starts `kernel` as `launch` says, on `grid` blocks (the first number may be large, others at most `MOST_BLOCKS`).
    `arguments` are all of the kernel's but the blocks of `launch`. An empty grid starts nothing."""
    assert kernel.__name__ == launch.kernel, f"{kernel.__name__} is started by the launch of {launch.kernel}"
    assert max(grid[1:], default=0) <= MOST_BLOCKS, f"{launch.kernel} has a grid of {grid}"
    if 0 not in grid:
        kernel[grid](**arguments, **launch.blocks, **options_of(launch))


def options_of(launch: Launch) -> dict[str, Any]:
    """What Triton's compiler is asked for."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    return options if launch.registers is None else options | {"maxnreg": launch.registers}


def capability(tensor: torch.Tensor) -> int:
    """The compute capability of the GPU that holds `tensor`, 90 for 9.0."""
    return _capability(tensor.device.index) if tensor.is_cuda else ASSUMED_CAPABILITY


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` of the CPU's memory on `device`, without waiting. A copy of what is not pinned would wait until the
    device has done all that it was asked for."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


@lru_cache
def _capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """`x` rounded to nearest in `dtype`. The interpreter alone truncates float32 to bfloat16, and NaN is no matter of
    rounding."""
    if IS_INTERPRETED and dtype == tl.bfloat16 and x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot_operand(x):
    """An operand of `tl.dot`: as it is, but float32 for bfloat16 in the interpreter, whose products of it are wrong."""
    if IS_INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def spread(scalar, like):
    """`scalar` once for each element of `like`, whole numbers: the interpreter takes no comparison of scalars as part
    of a mask."""
    return scalar + tl.zeros_like(like)
