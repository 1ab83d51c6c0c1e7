"""route: the experts of each token, and their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = False,
    scaling: float = 1.0,
    softmax_over_all: bool = False,
    sum_epsilon: float = 1e-20,
) -> torch.Tensor:
    """Select the `top_k` best experts of each token by the scores x W^T, of equal ones the lowest.

    Scores are computed in float32. `x` [tokens, hidden], `weight` [experts, hidden]. A `correction_bias` [experts]
    float32 means sigmoid routing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): the weights are the sigmoids of the
    scores, divided by their sum plus `least_sum` if `normalize`. The bias is added for the selection alone, which
    considers only the `top_groups` groups with the greatest sums of their two best scores. Without a bias, the weights
    are the softmax over the chosen scores, or with `over_all` the chosen entries of the softmax over all. All are
    multiplied by `scaling`.

    -> [tokens, 2, top_k] float32: the ids of the experts, best first, and their weights.
    """
    scores = F.linear(x.float(), weight.float())
    if correction_bias is None:
        ids = _best(scores, top_k)
        weights = scores.softmax(-1).gather(1, ids) if softmax_over_all else scores.gather(1, ids).softmax(-1)
    else:
        probabilities = scores.sigmoid()
        ids = _best(_allowed(probabilities + correction_bias, num_groups, top_groups), top_k)
        weights = probabilities.gather(1, ids)
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + sum_epsilon)
    return torch.stack((ids.float(), weights * scaling), dim=1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of each row's greatest values, of equal ones the first -> [rows, count] int64."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _allowed(choice: torch.Tensor, num_groups: int, top_groups: int) -> torch.Tensor:
    """Return `choice` with -inf outside the `top_groups` best groups."""
    if num_groups == 1:
        return choice
    grouped = choice.unflatten(-1, (num_groups, -1))
    best = _best(grouped.topk(2, dim=-1).values.sum(-1), top_groups)
    allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
