"""sample: the next token of each row, either the best one or a sample from its distribution; no graph contains it.

A token is sampled as the argmax of the restricted logits plus the Gumbel noise of `ops.noise`. `settings` [rows, 4]
float64 are a row's temperature (0: its best token), top_k (0: all tokens), top_p (1: all) and min_p (0: all); `keys`
[rows, 2] int32 are the keys of its noise. Both are in the CPU's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ostinato.ops import noise
from ostinato.ops.seeds import GUMBEL_MAX, GUMBEL_MIN

# A token this far below the best one cannot win, whatever their noise; 1 is room for rounding.
_HOPELESS = GUMBEL_MIN - GUMBEL_MAX - 1
# Noise for whole rows is made for this number of tokens at a time, to stay in a core's cache.
_NOISE_SLAB = 2**17
# Top-p reads this number of best tokens first, then eight times more, and so on, until they reach top_p.
_TOP_P_WINDOW = 256
# Divisors of logits, within float32's range. Below the least only the best tokens survive anyway, and above the
# greatest all tokens are alike.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30


def sample(
    logits: torch.Tensor, settings: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Select a token of each row of `logits` [rows, vocab] float32, which stay unchanged.

    -> tokens [rows] int32; -1 for a row without a finite best logit. Of equal ones the lowest token is the best.
    Without `settings`, every row gets its best token.
    """
    if settings is None or keys is None:
        return _best(logits)
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    greedy = settings[:, 0] == 0
    for rows, draws in ((greedy.nonzero().squeeze(1), False), ((~greedy).nonzero().squeeze(1), True)):
        if not len(rows):
            continue
        values = logits if len(rows) == len(logits) else logits[rows.to(logits.device)]
        if draws:
            values = restrict(values, settings[rows])
            _add_noise(values, keys[rows].to(logits.device))
        tokens[rows.to(logits.device)] = _best(values)
    return tokens


def restrict(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order: new logits [rows, vocab], the best of each row 0.

    Excluded tokens are -inf. Tokens that tie at the threshold of top-k or top-p are all kept, so that the result does
    not depend on any order. A row whose best logit is not finite becomes NaN.
    """
    temperature, top_k, top_p, min_p = settings.unbind(1)
    temperature = temperature.clamp(MIN_TEMPERATURE, MAX_TEMPERATURE).float().to(logits.device)
    # The best logit is subtracted first, so that no temperature makes it overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    vocab_size = logits.shape[-1]
    _apply(scaled, [(row, k) for row, k in enumerate(top_k.tolist()) if 0 < k < vocab_size], _top_k_threshold)
    _apply(scaled, [(row, p) for row, p in enumerate(top_p.tolist()) if p < 1], _top_p_threshold)
    _apply(scaled, [(row, math.log(p)) for row, p in enumerate(min_p.tolist()) if p > 0], _min_p_threshold)
    return scaled


def _apply(
    logits: torch.Tensor,
    settings: list[tuple[int, float]],
    threshold_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Set the logits below a row's threshold to -inf, in the rows that have the setting."""
    if not settings:
        return
    values = torch.tensor([value for _, value in settings], dtype=torch.float64, device=logits.device)
    if len(settings) == len(logits):
        logits.masked_fill_(logits < threshold_of(logits, values)[:, None], -math.inf)
        return
    rows = torch.tensor([row for row, _ in settings], device=logits.device)
    chosen = logits[rows]
    logits[rows] = chosen.masked_fill_(chosen < threshold_of(chosen, values)[:, None], -math.inf)


def _top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return the k-th largest value of each row."""
    places = top_k.long()[:, None] - 1
    best = logits.topk(int(places.max()) + 1, dim=-1).values
    return best.gather(1, places).squeeze(1)


def _top_p_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of each row that is needed to reach probability `top_p`.

    Sums are in float64, which makes them the same in a batch of one row and of many.
    """
    weight = top_p * logits.exp().sum(dim=-1, dtype=torch.float64)
    vocab_size = logits.shape[-1]
    threshold = torch.full_like(logits[:, 0], -math.inf)
    window = min(_TOP_P_WINDOW, vocab_size)
    left = torch.arange(len(logits), device=logits.device)
    while len(left) > 0:
        best = logits[left].topk(window, dim=-1).values
        reached = best.exp().cumsum(dim=-1, dtype=torch.float64) >= weight[left, None]
        last = reached.int().argmax(dim=-1, keepdim=True)
        threshold[left] = torch.where(reached[:, -1], best.gather(1, last).squeeze(1), -math.inf)
        if window == vocab_size:
            break
        left = left[~reached[:, -1]]
        window = min(8 * window, vocab_size)
    return threshold


def _min_p_threshold(_: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Return log(min_p), since the best logit of each row is 0."""
    return log_min_p.float()


def _best(values: torch.Tensor) -> torch.Tensor:
    """Return the best token of each row, of equal ones the lowest; -1 if its logit is not finite.

    NaN counts as the best.
    """
    if values.device.type == "cpu":
        # NumPy's argmax uses vector instructions, torch's does not. It takes a tenth of the time.
        array = values.numpy()
        tokens = array.argmax(axis=-1)
        finite = np.isfinite(array[np.arange(len(array)), tokens])
        return torch.from_numpy(np.where(finite, tokens, -1).astype(np.int32))
    best = values.max(dim=-1)
    return best.indices.where(best.values.isfinite(), -1).int()


def _add_noise(values: torch.Tensor, keys: torch.Tensor) -> None:
    """Add each row's Gumbel noise, in place, where it can matter; the best value of each row is 0."""
    vocab_size = values.shape[-1]
    flat = values.view(-1)
    hopeful = (flat >= _HOPELESS).nonzero().squeeze(1)
    if 4 * len(hopeful) < values.numel():
        row = hopeful // vocab_size
        token_ids = (hopeful - row * vocab_size).int()
        flat[hopeful] += noise.gumbel(keys[row], token_ids)
        return
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=values.device)
    slab = max(1, _NOISE_SLAB // vocab_size)
    for start in range(0, len(values), slab):
        values[start : start + slab] += noise.gumbel(keys[start : start + slab, None], token_ids)
