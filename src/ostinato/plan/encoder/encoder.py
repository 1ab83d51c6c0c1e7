"""Encoder budgets: the sizes, in output tokens, that a vision encoder's graphs are captured for, and how many images
each may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ostinato.errors import ConfigError, Remedy
from ostinato.plan.kernels import Backend

EncoderGraphMode = Literal["none", "auto", "always"]

BUDGETS, ITEMS = "encoder_token_budgets", "encoder_max_items_per_batch"
"""The settings that remedies name."""


@dataclass(frozen=True)
class EncoderBudgets:
    """`token_budgets`, ascending, are in output tokens. None is smaller than `max_items_per_batch`, so that each image
    of a pack has a token at least."""

    token_budgets: tuple[int, ...]
    max_items_per_batch: int


@dataclass(frozen=True)
class EncoderPlan:
    """What a vision encoder does. Tokens are output tokens; an item is one image, or one temporal patch of a video.

    Graphs are captured for `token_budgets`, none if `graph_mode` is `none`, of at most `max_items_per_batch` items
    each. `max_item_tokens` are those of the largest item that is served, which runs eagerly if no budget holds it.
    `auto`: a budget at which the graph is measured to lose runs eagerly; `always`: none does. `reason` says why it is
    the one or the other.

    The encoder cache has `num_cells` of `cell_bytes` each, the null one among them, one per token. `graph_bytes` are
    what graphs take with their buffers, and `activation_bytes` what encoding `most_tokens` at a time eagerly takes.
    """

    token_budgets: tuple[int, ...]
    max_items_per_batch: int
    max_item_tokens: int
    graph_mode: EncoderGraphMode
    reason: str
    backend: Backend
    num_cells: int
    cell_bytes: int
    cache_bytes: int
    graph_bytes: int
    activation_bytes: int
    video_pruning_rate: float

    @property
    def most_tokens(self) -> int:
        """Tokens that are encoded at a time: those of the largest image, or of several that fill the largest budget."""
        return max((self.max_item_tokens, *self.token_budgets))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"token_budgets": list(self.token_budgets)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EncoderPlan:
        """The plan that `to_json` gave."""
        return cls(**dict(data) | {"token_budgets": tuple(data["token_budgets"])})


def encoder_budgets(
    *,
    min_budget: int,
    max_budget: int,
    token_budgets: Iterable[int] | None = None,
    max_items_per_batch: int | None = None,
) -> EncoderBudgets:
    """The budgets that the settings come to. None is open.

    `min_budget` are the tokens of the model's smallest image, `max_budget` those of the largest that is served; where
    not even the smallest is, `max_budget` counts as both. Open budgets double from `min_budget`, or from the given
    items where these are more, and `max_budget` is appended. Open items are as many of the smallest image as
    `max_budget` holds, and no more than the smallest budget. Given budgets are sorted, each kept once, also those above
    `max_budget`.

    ConfigError if a value is no whole number of at least 1, the budgets are an empty list, the items are more than the
    smallest given budget (with a remedy for each of the two), or, budgets being open, more than `max_budget`.
    """
    for name, value in (("min_budget", min_budget), ("max_budget", max_budget)):
        if not _is_count(value):
            raise ConfigError(f"{name} = {value!r}: it is a whole number of tokens, at least 1")
    if max_items_per_batch is not None and not _is_count(max_items_per_batch):
        message = f"{ITEMS} = {max_items_per_batch!r}: it is a whole number of images, at least 1"
        raise ConfigError(message, [Remedy(ITEMS, 1)])
    min_budget = min(min_budget, max_budget)
    if token_budgets is None:
        budgets = doubling(max(min_budget, max_items_per_batch or 1), max_budget)
    else:
        budgets = checked_budgets(token_budgets)
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


def checked_budgets(given: Any) -> tuple[int, ...]:
    """The given budgets, ascending, each once. ConfigError if there are none, or one is no whole number of at least
    1."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        repaired = [given] if _is_count(given) else None
        raise ConfigError(f"{BUDGETS} = {given!r} is not a list of whole numbers", [Remedy(BUDGETS, repaired)])
    values = list(given)
    if not values:
        message = f"{BUDGETS} is an empty list; leave it open for the default ones, or set encoder_graph_mode to none"
        raise ConfigError(message, [Remedy(BUDGETS, None)])
    wrong = [repr(value) for value in values if not _is_count(value)]
    if wrong:
        message = f"{BUDGETS} has {', '.join(wrong)}: a budget is a whole number of tokens, at least 1"
        raise ConfigError(message, [Remedy(BUDGETS, sorted({value for value in values if _is_count(value)}) or None)])
    return tuple(sorted(set(values)))


def doubling(first: int, last: int) -> tuple[int, ...]:
    """`first`, twice that, and so on as far as below `last`, which ends them."""
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


def _is_count(value: Any) -> bool:
    # True and False are ints to Python, and mistakes here.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
