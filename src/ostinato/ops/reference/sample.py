"""sample: the next token of each row, either the best one or a sample from its distribution; no graph contains it.

A token is sampled as the argmax of the restricted logits plus the Gumbel noise of `ops.noise`. `settings` [rows, 4]
float64 are a row's temperature (0: its best token), top_k (0: all tokens), top_p (1: all) and min_p (0: all); `keys`
[rows, 2] int32 are the keys of its noise. Both are in the CPU's memory.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from ostinato.ops.arrays import host_values, like
from ostinato.ops.noise import gumbel
from ostinato.ops.seeds import GUMBEL_MAX, GUMBEL_MIN
from ostinato.ops.step_inputs import Array

# A token this far below the best one cannot win, whatever their noise; 1 is room for rounding.
_HOPELESS = GUMBEL_MIN - GUMBEL_MAX - 1
# Noise for whole rows is made for this number of tokens at a time, to stay in a core's cache.
_NOISE_SLAB = 2**17
# Top-p reads this number of best tokens first, then eight times more, and so on, until they reach top_p.
_TOP_P_WINDOW = 256
# Divisors of logits, within float32's range. Below the least only the best tokens survive anyway, and above the
# greatest all tokens are alike.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30


def sample(logits: Array, settings: Array | None = None, keys: Array | None = None) -> Array:
    """Select a token of each row of `logits` [rows, vocab] float32, which stay unchanged.

    -> tokens [rows] int32; -1 for a row without a finite best logit. Of equal ones the lowest token is the best.
    Without `settings`, every row gets its best token.
    """
    values = host_values(logits)
    if settings is None or keys is None:
        return like(logits, _best(values))
    tokens, of_rows, row_keys = np.empty(len(values), np.int32), host_values(settings), host_values(keys)
    draws = of_rows[:, 0] != 0
    if not draws.all():
        tokens[~draws] = _best(values[~draws])
    if draws.any():
        restricted = restrict(values[draws], of_rows[draws])
        _add_noise(restricted, row_keys[draws])
        tokens[draws] = _best(restricted)
    return like(logits, tokens)


def restrict(logits: np.ndarray, settings: np.ndarray) -> np.ndarray:
    """Apply temperature, top-k, top-p and min-p, in this order: new logits [rows, vocab], the best of each row 0.

    Excluded tokens are -inf. Tokens that tie at the threshold of top-k or top-p are all kept, so that the result does
    not depend on any order. A row whose best logit is not finite becomes NaN.
    """
    temperature = settings[:, 0].clip(MIN_TEMPERATURE, MAX_TEMPERATURE).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # The best logit is subtracted first, so that no temperature makes it overflow.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
        for row, (_, top_k, top_p, min_p) in zip(scaled, settings, strict=True):
            if 0 < top_k < len(row):
                row[row < np.partition(row, len(row) - int(top_k))[len(row) - int(top_k)]] = -math.inf
            if top_p < 1:
                row[row < _top_p_threshold(row, top_p)] = -math.inf
            if min_p > 0:
                row[row < np.float32(math.log(min_p))] = -math.inf
    return cast(np.ndarray, scaled)


def _top_p_threshold(row: np.ndarray, top_p: float) -> float:
    """Return the smallest value of a row that is needed to reach probability `top_p`.

    Sums are in float64, which makes them the same in a batch of one row and of many.
    """
    weight = top_p * np.exp(row).sum(dtype=np.float64)
    window = min(_TOP_P_WINDOW, len(row))
    while True:
        best = -np.sort(-(np.partition(row, len(row) - window)[len(row) - window :] if window < len(row) else row))
        reached = np.exp(best).cumsum(dtype=np.float64) >= weight
        if reached[-1]:
            return float(best[reached.argmax()])
        if window == len(row):
            return -math.inf
        window = min(8 * window, len(row))


def _best(values: np.ndarray) -> np.ndarray:
    """Return each row's best token (NaN is best; the lowest of equals), -1 if its logit is not finite."""
    tokens = values.argmax(axis=-1)
    finite = np.isfinite(values[np.arange(len(values)), tokens])
    return np.where(finite, tokens, -1).astype(np.int32)


def _add_noise(values: np.ndarray, keys: np.ndarray) -> None:
    """Add each row's Gumbel noise, in place, where it can matter; the best value of each row is 0."""
    for row, key in zip(values, keys, strict=True):
        hopeful = np.flatnonzero(row >= _HOPELESS).astype(np.int32)
        if 4 * len(hopeful) < len(row):
            row[hopeful] += gumbel(key, hopeful)
            continue
        for start in range(0, len(row), _NOISE_SLAB):
            part = row[start : start + _NOISE_SLAB]
            part += gumbel(key, np.arange(start, start + len(part), dtype=np.int32))
