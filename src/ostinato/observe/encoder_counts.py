"""Counts of the images that the vision encoder encoded, with a graph or eagerly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class EncoderPackCounts:
    """Packs of images that the vision encoder encoded together, all by one graph or for one reason without a graph."""

    packs: int = 0
    items: int = 0
    tokens: int = 0
    """Output tokens, without padding."""
    padding: int = 0
    seconds: float = 0.0
    """Wall time on the host."""

    def add(self, items: int, tokens: int, padding: int, seconds: float) -> None:
        """Add one pack."""
        self.packs += 1
        self.items += items
        self.tokens += tokens
        self.padding += padding
        self.seconds += seconds

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("packs", "items", "tokens", "seconds", "padding")}


@dataclass(slots=True)
class EncoderCounts:
    """Packs of images, by the graph that encoded them or by the reason why none did."""

    by_budget: dict[int, EncoderPackCounts] = field(default_factory=dict)
    """Token budget of the graph -> its packs."""
    eager: dict[str, EncoderPackCounts] = field(default_factory=dict)
    """Reason -> packs without a graph."""

    def count_replay(self, budget: int, items: int, tokens: int, seconds: float) -> None:
        self.by_budget.setdefault(budget, EncoderPackCounts()).add(items, tokens, budget - tokens, seconds)

    def count_eager(self, reason: str, items: int, tokens: int, seconds: float) -> None:
        self.eager.setdefault(reason, EncoderPackCounts()).add(items, tokens, 0, seconds)

    def clear(self) -> None:
        self.by_budget.clear()
        self.eager.clear()

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain data.

        `hits` are images that a graph encoded, `misses` those that ran eagerly. Tokens, padding and seconds are sums
        over all. The packs are listed by budget and by reason.
        """
        replayed, eager = list(self.by_budget.values()), list(self.eager.values())
        return {
            "hits": sum(one.items for one in replayed),
            "misses": sum(one.items for one in eager),
            "tokens": sum(one.tokens for one in replayed + eager),
            "padding": sum(one.padding for one in replayed),
            "seconds": sum(one.seconds for one in replayed + eager),
            "budgets": [{"budget": budget, **one.to_json()} for budget, one in sorted(self.by_budget.items())],
            "eager": [{"reason": reason, **one.to_json()} for reason, one in sorted(self.eager.items())],
        }
