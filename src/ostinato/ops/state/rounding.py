"""Rounding of float32 states to the dtype in which they are kept: to nearest, or stochastically.

Stochastic rounding takes one of the two neighbours of a value, the nearer one more often, so that the mean is the value
itself: what a state gains in small steps is not lost. The noise is a pure function of the absolute position of the
token after which a state is rounded, of the layer, and of the place in the state. So a request gets the same states
whatever its batch, whenever it is scheduled, and whether its tokens were drafts; and requests with one prefix share
them.

A place's noise is the exclusive or of a word of its column and one of its channel. Any two places' noise is
independent, which is all that the variance of a sum over a state depends on, and a word costs less than a hash.
"""

from __future__ import annotations

import torch

from ostinato.ops.noise import mix

WORD_BITS = 16
"""Of noise: as many as bfloat16 drops."""
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Of a float32 as long as the result is not denormal."""

LEAST_NORMAL_HALF = 2.0**-14
HALF_UNIT_BITS = 24
"""Below `LEAST_NORMAL_HALF`, a float16 counts units of 2^-24."""


def rounded(
    states: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor | None, noise: int | None
) -> torch.Tensor:
    """`states` [rows, heads, head_dim, size] float32 as they are kept in `dtype`, after tokens at `positions` [rows]
    int32. To nearest where `noise` is None or `dtype` is float32, else with the noise of that layer."""
    if noise is None or dtype not in DROPPED_BITS:
        return states.to(dtype)
    assert positions is not None, "noise is a function of positions"
    return round_stochastically(states, dtype, noise_of(positions, noise, *states.shape[1:]))


def noise_of(positions: torch.Tensor, layer: int, heads: int, head_dim: int, size: int) -> torch.Tensor:
    """Uniform words of `WORD_BITS` bits for a state after each of `positions` [rows] int32.

    -> [rows, heads, head_dim, size] int32
    """
    words = torch.arange(size + heads * head_dim, dtype=torch.int32, device=positions.device)
    at = mix(mix(positions.clone()) + layer)
    words = mix(at.unsqueeze(1) + words).bitwise_right_shift_(32 - WORD_BITS).bitwise_and_(2**WORD_BITS - 1)
    columns, channels = words.split((size, heads * head_dim), dim=1)
    return columns[:, None, None, :] ^ channels.unflatten(1, (heads, head_dim)).unsqueeze(-1)


def round_stochastically(values: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor) -> torch.Tensor:
    """float32 `values` as bfloat16 or float16, where `noise` is like them. The bits below those that are kept carry
    into them if noise is added that is no less than what they lack to the next value.

    What is representable stays as it is, NaN and infinity too. Beyond the largest number stands infinity.
    """
    bits = values.view(torch.int32)
    dropped = DROPPED_BITS[dtype]
    noise = noise >> (WORD_BITS - dropped)
    if dtype == torch.bfloat16:
        # In place, as a GPU's graph takes all rows' states at once. Without noise, a NaN of arithmetic stays one.
        carried = noise.masked_fill(values.isnan(), 0).add_(bits)
        return carried.bitwise_right_shift_(dropped).to(torch.int16).view(dtype)
    sign, magnitude = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    rebias = (127 - 15) << 10
    normal = ((magnitude + noise >> dropped) - rebias).clamp(max=0x7C00)
    small = values.abs() < LEAST_NORMAL_HALF
    units = torch.where(small, values.abs() * 2.0 ** (HALF_UNIT_BITS + dropped), 0).to(torch.int32)
    rounded = torch.where(small, units + noise >> dropped, normal)
    rounded = torch.where(values.isnan(), 0x7E00, rounded) | sign
    return rounded.to(torch.int16).view(dtype)
