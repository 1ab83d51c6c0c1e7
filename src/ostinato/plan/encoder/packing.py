"""Packing: which images the vision encoder takes together, and the graph that serves them.

`pack_items` is the one rule: what the plan says and what the engine does come from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.plan.graphs.coverage import smallest_holding


@dataclass(frozen=True)
class Pack:
    """Images that are encoded together: `indices` into what was packed, the smallest image first.

    `tokens` are their output tokens, `budget` those of the graph that serves them; None: they run eagerly.
    """

    indices: tuple[int, ...]
    tokens: int
    budget: int | None


def pack_items(sizes: Sequence[int], budgets: Sequence[int], max_items: int) -> list[Pack]:
    """Packs of images of `sizes` output tokens each, for graphs of the ascending `budgets`.

    Greedily, smallest first: each image begins a pack in the smallest budget that holds it, and the last two packs
    become one of at most `max_items` images, again and again, wherever that takes no more tokens of budget than the two
    apart. An image above the largest budget runs eagerly, alone, and so do all where there are no budgets.
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
    """One pack of the two, if that is allowed and no worse."""
    tokens, count = first.tokens + second.tokens, len(first.indices) + len(second.indices)
    budget = smallest_holding(budgets, tokens)
    if first.budget is None or second.budget is None or budget is None or count > max_items:
        return None
    if budget > first.budget + second.budget:
        return None
    return Pack(first.indices + second.indices, tokens, budget)
