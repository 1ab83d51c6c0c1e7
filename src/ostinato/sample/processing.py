"""From the model's logits to those that a token is drawn from.

The order: logit bias, `min_tokens` (end tokens are ruled out), repetition penalty, frequency and presence
penalty; then, unless greedy, temperature, top-k, top-p, min-p. The first four are `adjust`, the others
`restrict`. Where tokens tie at the threshold of top-k or top-p, all of them are kept, so that what is kept
does not depend on any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ostinato.sample.params import SamplingParams
from ostinato.sample.state import Pick

# How many of the best tokens top-p looks at first; eight times more, and so on, while they do not reach
# top_p.
_TOP_P_WINDOW = 256
# Divisors of logits, within what float32 holds; below the least nothing but the best tokens survives anyway, and
# above the greatest all tokens are alike.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30


def adjust(logits: torch.Tensor, picks: Sequence[Pick]) -> None:
    """Apply bias, `min_tokens` and penalties of each pick, in place on `logits` [picks, vocab] float32."""
    _add_bias(logits, picks)
    _rule_out_ends(logits, picks)
    _penalise(logits, picks)


def restrict(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p: new logits [rows, vocab], the best of each row 0.

    What is not to be sampled is -inf. A row whose best logit is not finite becomes NaN.
    """
    device = logits.device
    clamped = [min(max(p.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE) for p in params]
    temperature = torch.tensor(clamped, device=device)
    # The best logit is taken off first, so that no temperature makes it overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    vocab_size = logits.shape[-1]
    _apply(scaled, [(row, p.top_k) for row, p in enumerate(params) if 0 < p.top_k < vocab_size], _top_k_threshold)
    _apply(scaled, [(row, p.top_p) for row, p in enumerate(params) if p.top_p < 1], _top_p_threshold)
    _apply(scaled, [(row, math.log(p.min_p)) for row, p in enumerate(params) if p.min_p > 0], _min_p_threshold)
    return scaled


def _flat(row: int, vocab_size: int, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return row * vocab_size + np.asarray(token_ids, dtype=np.int64)


def _add_bias(logits: torch.Tensor, picks: Sequence[Pick]) -> None:
    biased = [(row, bias) for row, pick in enumerate(picks) if (bias := pick.state.params.logit_bias)]
    if not biased:
        return
    places = np.concatenate([_flat(row, logits.shape[-1], list(bias)) for row, bias in biased])
    values = torch.tensor([value for _, bias in biased for value in bias.values()], dtype=logits.dtype)
    logits.view(-1)[torch.from_numpy(places).to(logits.device)] += values.to(logits.device)


def _rule_out_ends(logits: torch.Tensor, picks: Sequence[Pick]) -> None:
    held = [
        _flat(row, logits.shape[-1], pick.state.held_back_token_ids)
        for row, pick in enumerate(picks)
        if pick.holds_back
    ]
    if held:
        logits.view(-1)[torch.from_numpy(np.concatenate(held)).to(logits.device)] = -math.inf


def _penalise(logits: torch.Tensor, picks: Sequence[Pick]) -> None:
    """Repetition penalty as in CTRL (arXiv 1909.05858), with negative logits multiplied; the others as
    OpenAI's."""
    rows = [row for row, pick in enumerate(picks) if pick.state.params.has_penalties]
    if not rows:
        return
    seen = [picks[row].state.counts().seen(picks[row].ahead) for row in rows]
    lengths = [len(token_ids) for token_ids, _ in seen]
    places = np.concatenate([_flat(row, logits.shape[-1], ids) for row, (ids, _) in zip(rows, seen, strict=True)])
    params = [picks[row].state.params for row in rows]
    repetition, frequency, presence = (
        _on(logits, np.repeat(np.asarray([getattr(p, name) for p in params], dtype=np.float32), lengths))
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    counts = _on(logits, np.concatenate([output_counts for _, output_counts in seen]))
    index = _on(logits, places)
    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[index] = values - frequency * counts - presence * (counts > 0)


def _on(logits: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)


def _apply(
    logits: torch.Tensor,
    settings: list[tuple[int, float]],
    threshold_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Set to -inf, in the rows that have the setting, what lies below the row's threshold."""
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
    """The k-th largest value of each row."""
    places = top_k.long()[:, None] - 1
    best = logits.topk(int(places.max()) + 1, dim=-1).values
    return best.gather(1, places).squeeze(1)


def _top_p_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest value of each row that is needed to reach probability `top_p`.

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
    """log(min_p), as the best logit of each row is 0."""
    return log_min_p.float()
