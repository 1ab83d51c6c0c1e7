"""Parts that Triton kernels share: launcher, activations, integers, noise, rounding, tiles over ragged rows.

Every launch passes `run`, so that a check can collect launches instead of running them. Rules for a wrapper in
`ops/triton/NAME.py`:

- `NAME(...)` has the parameters of the reference, and reads sizes from shapes, never a value from a device: the same
  call works on tensors of the device `meta`, on which checks collect launches, and inside a graph's capture.
- Numbers that change from step to step must be in tensors, since a graph keeps all others. The grid covers the padded
  step; the kernel finds the padding from the step's tensors.
- Its blocks come from the launch table: `launch_tables.NAME_launches(sizes, capability=launcher.capability(x))`.
- It starts kernels by `launcher.run(kernel, grid, launch, argument=...)`, arguments by name. Strides are arguments:
  layers pass views. Offsets that can pass 2^31 elements (slots, blocks) are computed in int64.

In a kernel, for the interpreter too: a scalar in a mask is `spread` before it is compared; float32 is rounded to
bfloat16 by `to_dtype` and not by `.to`; operands of `tl.dot` pass through `dot_operand`.

Noise (`ops.noise`) has the same 32 bits as the reference, and logarithms that may differ in the last bit. States are
rounded to the same bits as by `ops/reference/stochastic_rounding.py`.

Tiles over ragged rows: a program finds its row on the device, on a grid that follows from sizes known to the host. Row
r owns the tokens `starts[r]:starts[r + 1]`, and the tokens after the last row are one more row. Its tiles of `TILE`
tokens have the numbers from `starts[r] // TILE + r` on. There are enough numbers before the next row's: a number of
tokens, rounded up to tiles, is at most one more than the difference of the quotients. Surplus tiles are empty.
`ops/launch_tables/launch.py` counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables.launch import Launch
from ostinato.ops.seeds import HASH_MULTIPLIERS, HASH_SHIFTS
from ostinato.ops.sizes import MAX_INT8

# Kernels read globals only as `tl.constexpr`.
FIRST_MULTIPLIER, SECOND_MULTIPLIER = map(tl.constexpr, HASH_MULTIPLIERS)
FIRST_SHIFT, SECOND_SHIFT, LAST_SHIFT = map(tl.constexpr, HASH_SHIFTS)
MOST_INT8 = tl.constexpr(float(MAX_INT8))

NOT_PACKABLE = "the plan refuses ssm_checkpoint_dtype int8 on a GPU"


@triton.jit
def activate(x, NAME: tl.constexpr):
    if NAME == "silu" or NAME == "swiglu":
        x = silu(x)
    elif NAME == "relu2":
        x = tl.where(x > 0, x * x, x * 0)  # NaN stays NaN.
    elif NAME == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_pytorch_tanh" or NAME == "geglu":
        # 1 + tanh(z) is twice the logistic function of 2 z.
        x = x / (1 + tl.exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return x


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def larger(largest, x):
    """Return `largest` or a row's largest magnitude in `x` [rows, elements], [rows]; NaN if either has one."""
    x = tl.abs(x.to(tl.float32))
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    most = tl.where(has_nan, float("nan"), tl.max(x, 1))
    return tl.where((most > largest) | (most != most), most, largest)


@triton.jit
def scale_of(largest):
    """Return the scale of rows with these largest magnitudes. Division rounds to the nearest float, as everywhere."""
    return tl.div_rn(largest, tl.full(largest.shape, MOST_INT8, tl.float32))


@triton.jit
def rounded_to_integer(x, scale):
    """Round `x` [rows, elements] to steps of each row's scale, to nearest even."""
    divisor = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros(x.shape, tl.float32)
    steps = tl.div_rn(x.to(tl.float32), divisor)
    steps = tl.minimum(tl.maximum(steps, -MOST_INT8), MOST_INT8)
    # A float of 1.5 * 2^23 has no fractional bits, so its lowest bits are the integer.
    return ((steps + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)


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
    """Round `x` to nearest in `dtype`. Only the interpreter truncates float32 to bfloat16. NaN stays NaN."""
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
    """Return `scalar` for each element of `like`: the interpreter takes no comparison of scalars as a mask's part."""
    return scalar + tl.zeros_like(like)


@triton.jit
def noise_bits(token, low, high):
    """Return the word of each `token`, for the key (`low`, `high`). All are uint32."""
    return mix(mix(token ^ low) + high)


@triton.jit
def mix(x):
    """Apply `ops.noise.mix` to uint32."""
    x = (x ^ (x >> FIRST_SHIFT)) * FIRST_MULTIPLIER
    x = (x ^ (x >> SECOND_SHIFT)) * SECOND_MULTIPLIER
    return x ^ (x >> LAST_SHIFT)


@triton.jit
def to_gumbel(bits):
    """Return Gumbel variates, float32, from uint32 words."""
    distance = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # This is log(1 - distance), accurate also where 1 - distance rounds, since the error is known exactly.
    rest = 1 - distance
    survival = tl.where(rest == 1, -distance, tl.log(rest) * distance / tl.where(rest == 1, 1.0, 1 - rest))
    waiting = tl.where((bits >> 31) == 1, tl.log(distance), survival)
    return -tl.log(-waiting)


@triton.jit
def mix_rounding(x):
    """Apply the bijection of 32-bit integers of `ops/noise.py`; `x` is uint32."""
    x = x ^ (x >> FIRST_SHIFT)
    x = x * tl.full((), FIRST_MULTIPLIER, tl.uint32)
    x = x ^ (x >> SECOND_SHIFT)
    x = x * tl.full((), SECOND_MULTIPLIER, tl.uint32)
    return x ^ (x >> LAST_SHIFT)


@triton.jit
def noise_words(at, places):
    """Return words of 16 bits for some columns or channels; `at` is the mixed position and layer."""
    return (mix_rounding(at + places.to(tl.uint32)) >> 16).to(tl.int32)


@triton.jit
def rounded_stochastically(
    state, channels, columns, position, noise, state_size, dtype: tl.constexpr, HAS_NOISE: tl.constexpr
):
    """Round float32 `state` [channels, columns] to `dtype`, after the token at `position`.

    `channels` and `columns` are its indices in a layer's state [heads * head_dim, state_size]; `noise` is the layer.
    """
    if HAS_NOISE and dtype != tl.float32:
        position = position.to(tl.uint32)
        at = mix_rounding(mix_rounding(position) + noise.to(tl.uint32))
        words = noise_words(at, columns)[None, :] ^ noise_words(at, state_size + channels)[:, None]
        bits = state.to(tl.int32, bitcast=True)
        is_number = state == state
        if dtype == tl.bfloat16:
            carried = (bits + tl.where(is_number, words, 0)) >> 16
            kept = carried.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            words = words >> 3  # Keep as many of the 16 bits as float16 drops.
            sign = (bits >> 16) & 0x8000
            magnitude = bits & 0x7FFFFFFF
            normal = tl.minimum(((magnitude + words) >> 13) - (112 << 10), 0x7C00)
            size = tl.abs(state)
            is_small = size < 6.103515625e-05
            units = tl.where(is_small, size * 137438953472.0, 0.0).to(tl.int32)
            number = tl.where(is_small, (units + words) >> 13, normal)
            whole = tl.where(is_number, number, 0x7E00) | sign
            kept = whole.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        kept = to_dtype(state, dtype)
    return kept


@triton.jit
def step_size(dt, bias, low, high):
    """Return softplus(dt + bias) between `low` and `high`, in float32, precise also where it is small."""
    x = dt.to(tl.float32) + bias
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    # This is log(1 + e); the rounding error of 1 + e is divided out again.
    exact = tl.where(above == 1.0, grown, tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.minimum(tl.maximum(tl.where(x > 20.0, x, exact), low), high)


@triton.jit
def owner_of(index, starts, count, base, TILE: tl.constexpr, EXTRA: tl.constexpr, SPAN: tl.constexpr):
    """Return the last of `count` rows whose first tile's number is at most `index`.

    That number is `(start - base) // TILE`, plus `EXTRA` for each row before it.
    """
    row = -1
    for first in range(0, count, SPAN):
        each = first + tl.arange(0, SPAN)
        start = tl.load(starts + each, mask=each < count, other=0)
        row += tl.sum(((each < count) & ((start - base) // TILE + EXTRA * each <= index)).to(tl.int32))
    return row


@triton.jit
def find_tile(starts, rows, tokens, index, TILE: tl.constexpr, SPAN: tl.constexpr):
    """Return (row, first token, end) of tile `index`, which has up to `TILE` tokens and may have none.

    `row` is `rows` for the tokens after the last one.
    """
    row = owner_of(index, starts, rows + 1, 0, TILE, 1, SPAN)
    start = tl.load(starts + row)
    end = tl.where(row < rows, tl.load(starts + tl.minimum(row + 1, rows)), tokens)
    first = start + (index - start // TILE - row) * TILE
    return row, first, tl.minimum(end, first + TILE)


ROW_INPUTS = ("row_starts", "start_positions", "read_slots", "write_slots")
"""Inputs with an entry per row.

Entries of prompts follow those of decode rows, at another address in each step: a kernel must not be specialised on it.
"""


@triton.jit
def segment_of(index, row_starts, rows, TOKENS: tl.constexpr, SPAN: tl.constexpr):
    """Return (row, first token) of a segment; each row is split into segments of `TOKENS` tokens from its begin.

    The token is at or after the row's end if `index` is one too many. Row r's segments begin with number `start //
    TOKENS + r`. So `tokens // TOKENS + rows` programs are enough, whatever the lengths, and the host need not know
    them.
    """
    base = tl.load(row_starts)  # Other rows may come first.
    own = owner_of(index, row_starts, rows, base, TOKENS, 1, SPAN)
    start = tl.load(row_starts + own)
    return own, start + (index - (start - base) // TOKENS - own) * TOKENS


@triton.jit
def first_chunk(row, start, base, TOKENS: tl.constexpr):
    """Return the number of a row's first chunk, if rows are split at absolute multiples of `TOKENS`.

    A row of n tokens has at most n // TOKENS + 2 chunks, so `tokens // TOKENS + 2 * rows` are enough.
    """
    return (start - base) // TOKENS + 2 * row


@triton.jit
def chunk_of(index, row_starts, start_positions, rows, TOKENS: tl.constexpr, SPAN: tl.constexpr):
    """Return (row, first token, end) of a chunk, which may have no tokens."""
    base = tl.load(row_starts)  # Other rows may come first.
    own = owner_of(index, row_starts, rows, base, TOKENS, 2, SPAN)
    start, end = tl.load(row_starts + own), tl.load(row_starts + own + 1)
    before = tl.load(start_positions + own) % TOKENS  # Tokens of the first chunk in earlier steps.
    first = start - before + (index - first_chunk(own, start, base, TOKENS)) * TOKENS
    return own, tl.maximum(first, start), tl.minimum(first + TOKENS, end)


def checkpoint_table(
    checkpoints: Sequence[tuple[int, int, int]], first_row: int, rows: int, device: torch.device
) -> tuple[torch.Tensor | None, int]:
    """Return the checkpoints of `rows` rows from `first_row` on, as int32, and their number.

    The table has `rows + 1` begins of the rows' entries, then (offset, slot) of each, by row. None and 0 if there are
    no checkpoints.
    """
    if not checkpoints:
        return None, 0
    return _table(tuple(map(tuple, checkpoints)), first_row, rows, device), len(checkpoints)


@lru_cache(64)
def _table(
    checkpoints: tuple[tuple[int, int, int], ...], first_row: int, rows: int, device: torch.device
) -> torch.Tensor:
    """Make the table once for all layers of a step."""
    ordered = sorted(checkpoints)
    begins = [sum(row - first_row < r for row, _, _ in ordered) for r in range(rows + 1)]
    places = [place for _, offset, slot in ordered for place in (offset, slot)]
    return sent(torch.tensor(begins + places, dtype=torch.int32), device)
