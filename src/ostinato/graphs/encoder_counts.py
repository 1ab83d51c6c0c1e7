"""What the vision encoder did: images that a graph served, those that ran eagerly and why, and the padding."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class PackCount:
    """Packs of one kind. Tokens are output tokens, as they were and with the padding; seconds are the host's."""

    packs: int = 0
    items: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        counted = asdict(self)
        del counted["padded_tokens"]
        return counted | {"padding": self.padded_tokens - self.tokens}


@dataclass(slots=True)
class EncoderCounts:
    """Counts since the start."""

    by_budget: dict[int, PackCount] = field(default_factory=dict)
    """Budget of the graph -> its packs."""
    eager: dict[str, PackCount] = field(default_factory=dict)
    """Reason -> packs without a graph."""

    def count_replay(self, budget: int, items: int, tokens: int, seconds: float) -> None:
        _add(self.by_budget.setdefault(budget, PackCount()), items, tokens, budget, seconds)

    def count_eager(self, reason: str, items: int, tokens: int, seconds: float) -> None:
        _add(self.eager.setdefault(reason, PackCount()), items, tokens, tokens, seconds)

    def clear(self) -> None:
        self.by_budget.clear()
        self.eager.clear()

    def to_json(self) -> dict[str, Any]:
        """As plain data: images that a graph served (`hits`) and those that ran eagerly (`misses`), all padding and
        seconds, and the packs of each budget and of each reason."""
        replayed, eager = list(self.by_budget.values()), list(self.eager.values())
        return {
            "hits": sum(one.items for one in replayed),
            "misses": sum(one.items for one in eager),
            "tokens": sum(one.tokens for one in replayed + eager),
            "padding": sum(one.padded_tokens - one.tokens for one in replayed),
            "seconds": sum(one.seconds for one in replayed + eager),
            "budgets": [{"budget": budget, **one.to_json()} for budget, one in sorted(self.by_budget.items())],
            "eager": [{"reason": reason, **one.to_json()} for reason, one in sorted(self.eager.items())],
        }


def _add(count: PackCount, items: int, tokens: int, padded_tokens: int, seconds: float) -> None:
    count.packs += 1
    count.items += items
    count.tokens += tokens
    count.padded_tokens += padded_tokens
    count.seconds += seconds
