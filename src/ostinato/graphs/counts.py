"""What the steps were: replayed as a full or a piecewise graph, or run eagerly, with how much padding and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ostinato.plan.graphs.coverage import StepMode
from ostinato.plan.graphs.traffic import Traffic


@dataclass(slots=True)
class SizeCount:
    """Steps that one graph served. Tokens are counted as they were, and with the padding."""

    steps: int = 0
    tokens: int = 0
    padded_tokens: int = 0


@dataclass(slots=True)
class StepCounts:
    """Counts since the start. The sum over all modes is the number of steps."""

    by_graph: dict[tuple[StepMode, int, int | None], SizeCount] = field(default_factory=dict)
    """(mode, size, tokens per row of a full graph) -> its steps."""
    eager: Counter[str] = field(default_factory=Counter)
    """Reason -> steps without a graph."""
    eager_tokens: Counter[str] = field(default_factory=Counter)
    """Reason -> their tokens."""
    unplanned: int = 0
    """Eager steps for which the plan had promised a graph."""
    traffic: Traffic = field(default_factory=Traffic)

    def count_replay(
        self, mode: StepMode, size: int, tokens_per_row: int | None, tokens: int, padded_tokens: int
    ) -> None:
        one = self.by_graph.setdefault((mode, size, tokens_per_row), SizeCount())
        one.steps += 1
        one.tokens += tokens
        one.padded_tokens += padded_tokens

    def count_eager(self, reason: str, tokens: int, was_planned: bool) -> None:
        self.eager[reason] += 1
        self.eager_tokens[reason] += tokens
        self.unplanned += not was_planned

    def to_json(self) -> dict[str, Any]:
        """As plain data: steps per mode, per graph, and the reasons of eager ones."""
        graphs: list[dict[str, Any]] = [
            {
                "mode": mode,
                "size": size,
                "tokens_per_row": tokens_per_row,
                "steps": one.steps,
                "tokens": one.tokens,
                "padding": one.padded_tokens - one.tokens,
            }
            for (mode, size, tokens_per_row), one in sorted(self.by_graph.items(), key=lambda item: item[0][:2])
        ]
        steps = {mode: sum(g["steps"] for g in graphs if g["mode"] == mode) for mode in ("full", "piecewise")}
        return {
            "steps": {**steps, "eager": self.eager.total()},
            "padding": sum(g["padding"] for g in graphs),
            "graphs": graphs,
            "eager_reasons": dict(self.eager),
            "eager_tokens": dict(self.eager_tokens),
            "unplanned": self.unplanned,
            "traffic": self.traffic.to_json(),
        }
