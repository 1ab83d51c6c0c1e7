"""Rounding of float32 states to the dtype of their slots: to nearest, or stochastically; and to 8 bits, for packing.

Stochastic rounding takes one of the two neighbours of a value, the nearer one more often, so that the mean is the value
itself: a state does not lose what it gains in small steps. The noise is a pure function of the absolute position of the
token after which a state is rounded, of the layer, and of the position in the state. So a request gets the same states
in any batch, at any time of scheduling, and with or without drafts; and requests with one prefix share them.

An element's noise is the exclusive or of a word of its column and one of its channel. The noise of any two elements is
independent, which is all that the variance of a sum over a state depends on, and a word costs less than a hash.
"""

from __future__ import annotations

import torch

from ostinato.ops.seeds import HASH_MULTIPLIERS, HASH_SHIFTS
from ostinato.ops.sizes import INT8_STATE_BLOCK, INT8_STATE_TOKENS, MAX_INT8

WORD_BITS = 16
"""Bits of noise: as many as bfloat16 drops."""
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of a float32 that are dropped, if the result is not denormal."""

MIN_NORMAL_HALF = 2.0**-14
HALF_UNIT_BITS = 24
"""Exponent of a denormal float16's unit: below `MIN_NORMAL_HALF`, it counts units of 2^-24."""

# torch's int32 needs signed integers.
_SIGNED_MULTIPLIERS = tuple(each - 2**32 if each >= 2**31 else each for each in HASH_MULTIPLIERS)

LEAST_PACKED = 2.0**-100
"""Blocks whose values are all smaller than this are packed as zeros."""


def packed_values(states: torch.Tensor) -> torch.Tensor:
    """Return float32 `states` [..., size] rounded to what 8 bits hold without loss (`runner/cache_memory.py`).

    A block of up to `INT8_STATE_BLOCK` neighbours becomes integers times a scale, to nearest. The scale is the largest
    magnitude divided by `MAX_INT8`, rounded up to 16 significant bits: so the products are exact, the largest integer
    is `MAX_INT8`, and rounding once more changes nothing. A block with a value that is not finite becomes NaN.
    """
    size = states.shape[-1]
    blocks = torch.nn.functional.pad(states, (0, -size % INT8_STATE_BLOCK)).unflatten(-1, (-1, INT8_STATE_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = ((largest / MAX_INT8).view(torch.int32) + 0xFF & ~0xFF).view(torch.float32)
    scale = torch.where(largest < LEAST_PACKED, 1.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    # Adding 0.0 makes -0.0 what an integer gives.
    whole: torch.Tensor = (blocks / scale).round_().mul_(scale).add_(0.0).flatten(-2)[..., :size]
    return whole


def rounded(
    states: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor | None, noise: int | None, packable: bool = False
) -> torch.Tensor:
    """Return `states` [rows, heads, head_dim, size] float32 rounded to `dtype`.

    They follow tokens at `positions` [rows] int32. They are rounded to nearest if `noise` is None or `dtype` is
    float32, else with the noise of that layer. With `packable`, `dtype` is float32, and states after the last of
    `INT8_STATE_TOKENS` tokens become their `packed_values`.
    """
    if packable:
        assert positions is not None, "positions say where states are packable"
        is_last = ((positions + 1) % INT8_STATE_TOKENS == 0).view(-1, *[1] * (states.dim() - 1))
        return torch.where(is_last, packed_values(states), states) if is_last.any() else states
    if noise is None or dtype not in DROPPED_BITS:
        return states.to(dtype)
    assert positions is not None, "noise is a function of positions"
    return round_stochastically(states, dtype, noise_of(positions, noise, *states.shape[1:]))


def noise_of(positions: torch.Tensor, layer: int, heads: int, head_dim: int, size: int) -> torch.Tensor:
    """Return uniform `WORD_BITS`-bit words for states after `positions` [rows], [rows, heads, head_dim, size] int32."""
    words = torch.arange(size + heads * head_dim, dtype=torch.int32, device=positions.device)
    at = mix(mix(positions.clone()) + layer)
    words = mix(at.unsqueeze(1) + words).bitwise_right_shift_(32 - WORD_BITS).bitwise_and_(2**WORD_BITS - 1)
    columns, channels = words.split((size, heads * head_dim), dim=1)
    bits: torch.Tensor = columns[:, None, None, :] ^ channels.unflatten(1, (heads, head_dim)).unsqueeze(-1)
    return bits


def mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the bijection of `ops.noise.mix`, in place on int32."""
    scratch = torch.empty_like(x)
    for step, shift in enumerate(HASH_SHIFTS):
        # torch shifts signed integers arithmetically: the mask takes the copies of the sign bit away.
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(2 ** (32 - shift) - 1))
        if step < len(_SIGNED_MULTIPLIERS):
            x.mul_(_SIGNED_MULTIPLIERS[step])
    return x


def round_stochastically(values: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor) -> torch.Tensor:
    """Round float32 `values` to bfloat16 or float16 with `noise` of the same shape.

    The dropped bits plus the noise carry into the kept ones if the noise is no less than the distance to the next
    value. Representable values stay unchanged, NaN and infinity too. Values beyond the largest number become infinity.
    """
    bits = values.view(torch.int32)
    dropped = DROPPED_BITS[dtype]
    noise = noise >> (WORD_BITS - dropped)
    if dtype == torch.bfloat16:
        # It works in place, since a GPU's graph takes all rows' states at once. NaN gets no noise, so it stays NaN.
        carried = noise.masked_fill(values.isnan(), 0).add_(bits)
        return carried.bitwise_right_shift_(dropped).to(torch.int16).view(dtype)
    sign, magnitude = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    rebias = (127 - 15) << 10
    normal = ((magnitude + noise >> dropped) - rebias).clamp(max=0x7C00)
    small = values.abs() < MIN_NORMAL_HALF
    units = torch.where(small, values.abs() * 2.0 ** (HALF_UNIT_BITS + dropped), 0).to(torch.int32)
    rounded = torch.where(small, units + noise >> dropped, normal)
    rounded = torch.where(values.isnan(), 0x7E00, rounded) | sign
    return rounded.to(torch.int16).view(dtype)
