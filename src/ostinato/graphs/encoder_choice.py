"""Graph or eager: both are timed when a budget's graph has been captured, and the faster one serves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_ROUNDS = 5
ENOUGH_SECONDS = 0.2
"""Of a budget's timing. The round that is under way is finished, so large budgets get one."""


@dataclass(frozen=True, slots=True)
class BudgetTimes:
    """Seconds of one pack that fills a budget, the shortest of each way; None where nobody had to know."""

    budget: int
    graph_seconds: float | None = None
    eager_seconds: float | None = None

    @property
    def graph_loses(self) -> bool:
        if self.graph_seconds is None or self.eager_seconds is None:
            return False
        return self.graph_seconds > self.eager_seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "graph_seconds": self.graph_seconds,
            "eager_seconds": self.eager_seconds,
            "runs": "eager" if self.graph_loses else "graph",
        }


def time_both(
    budget: int,
    graph: Callable[[], object],
    eager: Callable[[], object],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> BudgetTimes:
    """Runs a pack both ways in turns. `wait` returns when the device has done all that was asked of it."""
    graphs: list[float] = []
    eagers: list[float] = []
    begin = clock()
    while len(graphs) < MOST_ROUNDS and (not graphs or clock() - begin < ENOUGH_SECONDS):
        for run, seconds in ((eager, eagers), (graph, graphs)):
            wait()
            before = clock()
            run()
            wait()
            seconds.append(clock() - before)
    return BudgetTimes(budget, min(graphs), min(eagers))
