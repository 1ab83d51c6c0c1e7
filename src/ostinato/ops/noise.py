"""Sampling noise as a pure function of (seed, position, token id), without generator state.

A token is sampled as the argmax of `logits / temperature + gumbel`. As the noise of one token at one position
of one request depends on nothing else, the sampled tokens do not depend on the rest of the batch, on how the
prompt was split, on which tokens were ruled out before, or on whether a token was first guessed by a proposer.

The key of a position is two 32-bit words from the splitmix64 finaliser (`ops/seeds.py`). Each token id is mixed with
both by 32-bit integer steps (the constants are in `ops/seeds.py`), which wrap around and are the same on every device;
only the logarithms at the end may differ in the last bit between devices.

Resolution: of the 32 bits, one picks the half of the unit interval and 31 the distance w = (m + 1/2) / 2^32
from its outer end, so both tails are resolved down to 2^-33. With E = -log(1 - w) or -log(w), the noise g =
-log(E) lies between `GUMBEL_MIN` = -3.13 and `GUMBEL_MAX` = 22.88: a token less likely than about 2^-32 is
sampled too rarely. Two tokens at one position never share a hash, as the mix is a bijection.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from ostinato.ops.seeds import HASH_MULTIPLIERS, HASH_SHIFTS


def gumbel(keys: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Return standard Gumbel noise, float32.

    `keys` is [..., 2] int32 (from `ops.arrays.noise_keys`) and `token_ids` int32. The result has the shape of
    `keys[..., 0]` broadcast with `token_ids`: for [rows, 2], pass tokens as [vocab] with `keys[:, None]`, or one pair
    each.
    """
    words = keys.view(np.uint32)
    return gumbel_of(mix(mix(token_ids.view(np.uint32) ^ words[..., 0]) + words[..., 1]))


def mix(x: np.ndarray) -> np.ndarray:
    """Return a bijection of the 32-bit integers, uint32, that spreads every input bit."""
    for step, shift in enumerate(HASH_SHIFTS):
        x = x ^ (x >> np.uint32(shift))
        if step < len(HASH_MULTIPLIERS):
            x = x * np.uint32(HASH_MULTIPLIERS[step])
    return x


def gumbel_of(bits: np.ndarray) -> np.ndarray:
    """Return Gumbel variates from uniform words, uint32; a first bit of 1 selects the half with E above log 2."""
    distance = ((bits & 0x7FFFFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    log_survival = np.where(bits >> 31, np.log(distance), np.log1p(-distance))
    return cast(np.ndarray, -np.log(-log_survival))
