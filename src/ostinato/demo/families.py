"""The families of problems, and how often each is drawn.

A family writes its equations on a `Sheet` in the order of the worked answer, and returns the question and
the result.
"""

from __future__ import annotations

from collections.abc import Callable

from . import counts, flows, prices, stories, sums
from .sheet import Draw, Sheet

Family = Callable[[Draw, Sheet], tuple[str, int]]

FAMILIES: dict[str, tuple[Family, float]] = {
    "story": (stories.story, 9.0),
    "condition": (stories.condition, 1.0),
    "pile": (sums.pile, 2.0),
    "bare_sum": (sums.bare_sum, 1.0),
    "days": (stories.days, 2.0),
    "saving": (flows.saving, 2.0),
    "riders": (flows.riders, 2.0),
    "compare": (counts.compare, 4.0),
    "transfer": (counts.transfer, 4.0),
    "boxes": (counts.boxes, 2.5),
    "cost": (prices.cost, 2.5),
    "two_products": (prices.two_products, 2.0),
    "parts": (counts.parts, 1.5),
    "week": (flows.week, 2.0),
    "gather": (counts.gather, 1.5),
}
