"""Log-probabilities of known tokens and of the most likely ones, from the model's raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.schedule.batch import TokenLogprobs

# Number of logits that are normalised at a time, as their log-probabilities are a copy.
_MAX_LOGITS_AT_ONCE = 2**22


def score_tokens(
    logits: torch.Tensor, logits_rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Score `token_ids[i]` by row `logits_rows[i]` of `logits` [positions, vocab], with the `num_top[i]` best tokens.

    The best come first, of equal ones the lowest id; the rank is 1 plus the number of tokens that are more likely.
    """
    scored: list[TokenLogprobs] = []
    slab = max(1, _MAX_LOGITS_AT_ONCE // logits.shape[-1])
    for start in range(0, len(logits_rows), slab):
        part = slice(start, start + slab)
        rows = logits[torch.tensor(logits_rows[part], device=logits.device)]
        scored += _score_slab(rows, token_ids[part], num_top[part])
    return scored


def _score_slab(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    # The sum is in int32, as torch copies its input to the dtype of the sum.
    ranks = ((logits > logits.gather(1, ids)).sum(dim=-1, dtype=torch.int32) + 1).tolist()
    own = logprobs.gather(1, ids).squeeze(1).tolist()
    vocab_size = logits.shape[-1]
    # One more than asked for shows whether the last place is shared.
    most = min(max(num_top) + 1, vocab_size) if max(num_top) > 0 else 0
    best = logits.topk(most, dim=-1)
    best_ids, best_logits = best.indices.tolist(), best.values.tolist()
    best_logprobs = logprobs.gather(1, best.indices).tolist()
    scored = []
    for i, (token, wanted) in enumerate(zip(token_ids, num_top, strict=True)):
        wanted = min(wanted, vocab_size)
        if 0 < wanted < vocab_size and best_logits[i][wanted - 1] == best_logits[i][wanted]:
            top = _top_with_ties(logits[i], logprobs[i], wanted, best_logits[i][wanted])
        else:
            order = sorted(range(wanted), key=lambda j: (-best_logits[i][j], best_ids[i][j]))
            top = [(best_ids[i][j], best_logprobs[i][j]) for j in order]
        scored.append(TokenLogprobs(token, own[i], ranks[i], tuple(top)))
    return scored


def _top_with_ties(
    logits: torch.Tensor, logprobs: torch.Tensor, wanted: int, threshold: float
) -> list[tuple[int, float]]:
    """Return the best `wanted` tokens of one row if several tokens share the last place."""
    ids = (logits >= threshold).nonzero().squeeze(1)
    order = logits[ids].sort(descending=True, stable=True).indices[:wanted]
    ids = ids[order]
    return list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
