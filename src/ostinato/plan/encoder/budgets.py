"""Encoder budgets: capture sizes of a vision encoder's graphs, in output tokens, and the packing of images.

A budget also limits the number of images. `pack_items` is the one rule for which images are encoded together, and by
which graph. The plan and the engine both use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.config_fields import BUDGETS, checked_sizes, is_count
from ostinato.errors import ConfigError, Remedy
from ostinato.plan.graphs.coverage import smallest_holding

ITEMS = "encoder_max_items_per_batch"


@dataclass(frozen=True)
class EncoderBudgets:
    """Budgets of an encoder's graphs.

    `token_budgets`, ascending, are in output tokens. None is smaller than `max_items_per_batch`, since each image of a
    pack has at least one token.
    """

    token_budgets: tuple[int, ...]
    max_items_per_batch: int


def encoder_budgets(
    *,
    min_budget: int,
    max_budget: int,
    token_budgets: Iterable[int] | None = None,
    max_items_per_batch: int | None = None,
) -> EncoderBudgets:
    """Return the budgets that result from the settings. None is open.

    `min_budget` is the number of tokens of the model's smallest image, `max_budget` that of the largest that is served;
    if not even the smallest is served, `max_budget` counts as both. Open budgets double from `min_budget`, or from the
    given items if these are more, and `max_budget` is appended. Open items are as many of the smallest image as
    `max_budget` holds, and no more than the smallest budget. Given budgets are sorted, each kept once, also those above
    `max_budget`.

    ConfigError if a value is no whole number of at least 1, the budgets are an empty list, the items are more than the
    smallest given budget (with a remedy for each of the two), or, budgets being open, more than `max_budget`.
    """
    for name, value in (("min_budget", min_budget), ("max_budget", max_budget)):
        if not is_count(value):
            raise ConfigError(f"{name} = {value!r}: it is a whole number of tokens, at least 1")
    if max_items_per_batch is not None and not is_count(max_items_per_batch):
        message = f"{ITEMS} = {max_items_per_batch!r}: it is a whole number of images, at least 1"
        raise ConfigError(message, [Remedy(ITEMS, 1)])
    min_budget = min(min_budget, max_budget)
    if token_budgets is None:
        budgets = doubling(max(min_budget, max_items_per_batch or 1), max_budget)
    else:
        budgets = checked_sizes(BUDGETS, token_budgets)
    if max_items_per_batch is None:
        return EncoderBudgets(budgets, min(max_budget // min_budget, budgets[0]))
    if token_budgets is None and max_items_per_batch > max_budget:
        message = (
            f"{ITEMS} {max_items_per_batch} is more than the largest budget has tokens, {max_budget}, "
            "and each image has at least one"
        )
        raise ConfigError(message, [Remedy(ITEMS, max_budget)])
    if max_items_per_batch > budgets[0]:
        raise _too_many_items(max_items_per_batch, budgets)
    return EncoderBudgets(budgets, max_items_per_batch)


def doubling(first: int, last: int) -> tuple[int, ...]:
    """Return `first`, its doubles below `last`, and `last`."""
    budgets = []
    while first < last:
        budgets.append(first)
        first *= 2
    return (*budgets, last)


def _too_many_items(items: int, budgets: tuple[int, ...]) -> ConfigError:
    message = (
        f"{ITEMS} {items} is more than the smallest of {BUDGETS}, {budgets[0]}, has tokens, and each image has at "
        f"least one: lower {ITEMS} to at most {budgets[0]}, or give no budget below {items}"
    )
    large_enough = [budget for budget in budgets if budget >= items] or [items]
    return ConfigError(message, [Remedy(ITEMS, budgets[0]), Remedy(BUDGETS, large_enough)])


@dataclass(frozen=True)
class Pack:
    """Images that are encoded together: `indices` into the packed sequence, the smallest image first.

    `tokens` are their output tokens, `budget` those of the graph that serves them; None: they run eagerly.
    """

    indices: tuple[int, ...]
    tokens: int
    budget: int | None


def pack_items(sizes: Sequence[int], budgets: Sequence[int], max_items: int, prefix: int = 0) -> list[Pack]:
    """Return packs of images of `sizes` output tokens each, for graphs of the ascending `budgets`.

    The method is greedy, smallest first: each image begins a pack in the smallest budget that holds it. Then the last
    two packs are merged repeatedly into one of at most `max_items` images, as long as that takes no more budget tokens
    than the two separately. An image above the largest budget runs eagerly and alone; so do all if there are no
    budgets. A graph has room for the `prefix` of one image, counted in tokens; that of further images takes room from
    their tokens.
    """
    packs: list[Pack] = []
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        packs.append(Pack((index,), sizes[index], smallest_holding(budgets, sizes[index])))
        while len(packs) > 1:
            both = _together(packs[-2], packs[-1], budgets, max_items, prefix)
            if both is None:
                break
            packs[-2:] = [both]
    return packs


def _together(first: Pack, second: Pack, budgets: Sequence[int], max_items: int, prefix: int) -> Pack | None:
    """Return one pack of the two, or None if that is not allowed or worse."""
    tokens, count = first.tokens + second.tokens, len(first.indices) + len(second.indices)
    budget = smallest_holding(budgets, tokens + prefix * (count - 1))
    if first.budget is None or second.budget is None or budget is None or count > max_items:
        return None
    if budget > first.budget + second.budget:
        return None
    return Pack(first.indices + second.indices, tokens, budget)
