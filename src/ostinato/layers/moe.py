"""Mixture-of-experts layers: expert weights, and the ways in which routers choose."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ostinato.layers.build import Build


class Experts(nn.Module):
    """The experts of a layer, stacked. Each has its own tensors in the checkpoint: `{i}.up_proj.weight` and so on."""

    def __init__(self, build: Build, num_experts: int, in_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.ops = build.ops
        self.activation = activation
        inner_size = 2 * intermediate_size if activation == "swiglu" else intermediate_size
        self.up = build.weight(num_experts, inner_size, in_size)
        self.down = build.weight(num_experts, in_size, intermediate_size)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, in], `expert_ids` and `expert_weights` [tokens, k] -> [tokens, in]"""
        return self.ops.tap.split("moe", self._run, (x, expert_ids, expert_weights))

    def _run(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        return self.ops.moe(x, expert_ids, expert_weights, self.up, self.down, self.activation)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(self.up.shape[0]):
            yield f"{prefix}.{i}.up_proj.weight", self.up.data[i]
            yield f"{prefix}.{i}.down_proj.weight", self.down.data[i]


def route_grouped_sigmoid(
    scores: torch.Tensor,
    correction_bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid routing with a bias that only chooses (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    `scores` [tokens, experts] float32 before the sigmoid; experts outside the `top_groups` groups (by the sum of
    a group's two best) are not chosen. -> expert ids and weights, each [tokens, top_k].
    """
    probabilities = scores.sigmoid()
    choice = probabilities + correction_bias
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.topk(top_k, dim=-1).indices
    weights = probabilities.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def route_softmax(scores: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` best experts, weighted by the softmax over their scores alone.

    `scores` [tokens, experts] float32 -> expert ids and weights, each [tokens, top_k].
    """
    best = scores.topk(top_k, dim=-1)
    return best.indices, best.values.softmax(-1)
