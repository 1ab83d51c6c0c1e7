"""The token of each pick, from its logits: processed as its request asks, with the noise of its seed and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ostinato.sample import noise
from ostinato.sample.processing import adjust, restrict
from ostinato.sample.state import Pick

# A token so far below the best one cannot win, whatever their noise; 1 is room for rounding.
_HOPELESS = noise.GUMBEL_MIN - noise.GUMBEL_MAX - 1
# Noise for whole rows is made for so many tokens at a time, to stay in a core's cache.
_NOISE_SLAB = 2**17


def choose(logits: torch.Tensor, picks: Sequence[Pick]) -> dict[int, int]:
    """Index of a pick in `picks`, and of its row in `logits` [picks, vocab], left unchanged -> its token.

    A pick's token depends on its own logits and itself alone: a proposer that chooses a draft for the same pick, by
    logits of its own, therefore shares the noise with the target, and often the token. Picks without a finite best
    logit are left out.
    """
    chosen: dict[int, int] = {}
    for greedy in (True, False):
        places = [i for i, pick in enumerate(picks) if pick.state.params.greedy == greedy]
        if not places:
            continue
        group = [picks[i] for i in places]
        values = _take(logits, places)
        if not all(pick.plain for pick in group):
            values = values.clone() if values is logits else values
            adjust(values, group)
        if not greedy:
            values = restrict(values, [pick.state.params for pick in group])
            _add_noise(values, group)
        for place, token, value in zip(places, *_best(values), strict=True):
            if math.isfinite(value):
                chosen[place] = token
    return chosen


def _best(values: torch.Tensor) -> tuple[list[int], list[float]]:
    """The best token of each row, of equal ones the lowest, and its value; NaN counts as the best."""
    if values.device.type == "cpu":
        # NumPy's argmax uses vector instructions, which torch's does not: a tenth of the time.
        array = values.numpy()
        tokens = array.argmax(axis=-1)
        return tokens.tolist(), array[np.arange(len(array)), tokens].tolist()
    best = values.max(dim=-1)
    return best.indices.tolist(), best.values.tolist()


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows of the logits: `logits` itself if they are all of it."""
    if len(rows) == len(logits):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _add_noise(values: torch.Tensor, picks: Sequence[Pick]) -> None:
    """Add each row's Gumbel noise, in place, where it can matter; the best value of each row is 0."""
    row_keys = noise.keys([(pick.state.seed, pick.position) for pick in picks], values.device)
    vocab_size = values.shape[-1]
    flat = values.view(-1)
    hopeful = (flat >= _HOPELESS).nonzero().squeeze(1)
    if 4 * len(hopeful) < values.numel():
        row = hopeful // vocab_size
        token_ids = (hopeful - row * vocab_size).int()
        flat[hopeful] += noise.gumbel(row_keys[row], token_ids)
        return
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=values.device)
    slab = max(1, _NOISE_SLAB // vocab_size)
    for start in range(0, len(picks), slab):
        values[start : start + slab] += noise.gumbel(row_keys[start : start + slab, None], token_ids)
