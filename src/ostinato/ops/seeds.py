"""Seeds of requests and of their samples, and the constants of noise: pure functions of whole numbers.

The mixing is the splitmix64 finaliser (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014).

The build gives C++ the constants of the 32-bit hash and of the noise (`cmake/write_constants.py`). `ops/noise.py` says
how they are used.
"""

from __future__ import annotations

import math
from functools import lru_cache

MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
HASH_SHIFTS = (16, 15, 16)
"""Steps of Wellons' `lowbias32`, a bijection of 32 bits: shifts to the right, and multiplications between."""

GUMBEL_MIN = -math.log(-math.log(2.0**-33))
GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))
"""Least and greatest noise."""

GUMBEL_MIDDLE = -math.log(math.log(2.0))
"""Noise in the middle of the unit interval."""


def mix64(value: int) -> int:
    """Apply the finaliser of splitmix64, a bijection of the 64-bit integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request; sample 0 uses the request's own seed."""
    return seed & MASK64 if index == 0 else mix64((mix64(seed & MASK64) + index * GOLDEN) & MASK64)


def noise_word(seed: int, position: int) -> int:
    """Return the 64 bits that make the noise of a position of a request."""
    return mix64((_mixed(seed) + (position + 1) * GOLDEN) & MASK64)


@lru_cache(2**12)
def _mixed(seed: int) -> int:
    """Return the part of a word that all positions of a request share."""
    return mix64((seed + GOLDEN) & MASK64)


def seed_of_request(seed: int, number: int) -> int:
    """Return the seed of request `number` of an engine with this `seed`, for a request without a seed.

    Requests are numbered from 0. The seed is derived twice: a request's samples derive theirs from its own, and none
    may be another request's.
    """
    return derive_seed(derive_seed(seed, 1), number + 1)
