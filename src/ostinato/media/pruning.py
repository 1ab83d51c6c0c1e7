"""Which tokens of a video to leave out: those whose picture is what it was in the temporal patch before."""

from __future__ import annotations

from decimal import Decimal

import numpy as np


def kept_tokens(pixels: np.ndarray, rate: float) -> list[np.ndarray]:
    """The tokens that are kept of each temporal patch: ascending numbers from 0 to tokens - 1, int64.

    `pixels`: [temporal patches, tokens, elements] uint8, what each token stands for. Of all `n` tokens,
    `ceil(n * (1 - rate))` are kept, and at least those of the first temporal patch, which stays whole. Of the others,
    those are kept that differ most, by the sum of absolute differences, from the same place in the temporal patch
    before; of equals, the earlier. A temporal patch may keep none.
    """
    patches, tokens, _ = pixels.shape
    dropped = min(int(Decimal(str(rate)) * patches * tokens), (patches - 1) * tokens)
    differences = np.abs(pixels[1:].astype(np.int16) - pixels[:-1]).sum(axis=2, dtype=np.int64).reshape(-1)
    # Least different first; a stable sort of the reversed order puts the later of equals before the earlier.
    order = len(differences) - 1 - np.argsort(differences[::-1], kind="stable")
    keeps = np.ones(patches * tokens, dtype=bool)
    keeps[tokens + order[:dropped]] = False
    return [np.flatnonzero(row).astype(np.int64) for row in keeps.reshape(patches, tokens)]
