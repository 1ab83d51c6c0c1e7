"""Packing: which images the vision encoder encodes together, and the graph that serves them.

`pack_items` is the one rule, used by the plan and by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.plan.graphs.coverage import smallest_holding


@dataclass(frozen=True)
class Pack:
    """Images that are encoded together: `indices` into the packed sequence, the smallest image first.

    `tokens` are their output tokens, `budget` those of the graph that serves them; None: they run eagerly.
    """

    indices: tuple[int, ...]
    tokens: int
    budget: int | None


def pack_items(sizes: Sequence[int], budgets: Sequence[int], max_items: int) -> list[Pack]:
    """Return packs of images of `sizes` output tokens each, for graphs of the ascending `budgets`.

    The method is greedy, smallest first: each image begins a pack in the smallest budget that holds it. Then the last
    two packs are merged repeatedly into one of at most `max_items` images, as long as that takes no more budget tokens
    than the two separately. An image above the largest budget runs eagerly and alone; so do all if there are no
    budgets.
    """
    packs: list[Pack] = []
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        packs.append(Pack((index,), sizes[index], smallest_holding(budgets, sizes[index])))
        while len(packs) > 1:
            both = _together(packs[-2], packs[-1], budgets, max_items)
            if both is None:
                break
            packs[-2:] = [both]
    return packs


def _together(first: Pack, second: Pack, budgets: Sequence[int], max_items: int) -> Pack | None:
    """Return one pack of the two, or None if that is not allowed or worse."""
    tokens, count = first.tokens + second.tokens, len(first.indices) + len(second.indices)
    budget = smallest_holding(budgets, tokens)
    if first.budget is None or second.budget is None or budget is None or count > max_items:
        return None
    if budget > first.budget + second.budget:
        return None
    return Pack(first.indices + second.indices, tokens, budget)
