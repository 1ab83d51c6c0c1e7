"""Measurements of the engine's drafts: how many were right, what they cost, and whether the next step drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.observe.speculation_counts import SpeculationCounts
from ostinato.plan.speculation.drafter import SpeculativePlan
from ostinato.schedule.batch import Batch, StepResult
from ostinato.speculate.controller import DraftController


class SpeculationMonitor:
    """Counts of drafts, and the controller that uses them."""

    def __init__(self, plan: SpeculativePlan, num_captured: Callable[[], int]) -> None:
        """Create the counts and the controller. `num_captured` returns the number of graphs captured so far."""
        self._method = plan.method
        self.controller = DraftController(plan.num_speculative_tokens, plan.adaptive)
        self.counters = SpeculationCounts(plan.num_speculative_tokens, plan.draft_numbers)
        self._count_captured = num_captured
        self._num_captured = 0

    def count_step(self, batch: Batch, result: StepResult, seconds: float) -> None:
        """Count a step that succeeded."""
        count_drafts(self.counters, batch, result)
        num_captured = self._count_captured()
        # The time of a step that captured a graph is not typical.
        is_typical, self._num_captured = num_captured == self._num_captured, num_captured
        decode = result.rows[: batch.num_decode_rows]
        has_drafts = batch.num_drafts > 0 and any(row.num_drafts for row in decode)
        self.controller.record_step(
            [len(row.token_ids) for row in decode],
            batch.num_drafts if has_drafts else 0,
            seconds,
            is_pure_decode=is_typical and len(decode) == len(batch.rows),
            has_room=[0 < row.num_drafts == batch.num_drafts for row in batch.rows[: len(decode)]],
        )

    def to_json(self) -> dict[str, Any]:
        """Return counts and controller as plain data."""
        return {"method": self._method, **self.counters.to_json(), "controller": self.controller.to_json()}


def count_drafts(counts: SpeculationCounts, batch: Batch, result: StepResult) -> None:
    """Add a step that succeeded to the counts."""
    decode = result.rows[: batch.num_decode_rows]
    counts.count(batch.num_drafts, [(row.num_drafts, len(row.token_ids)) for row in decode if row.error is None])
