"""How many drafts were proposed, and how many of them were right. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ostinato.schedule.batch import Batch, StepResult


@dataclass(slots=True)
class SpeculationCounters:
    """Counts since the start, of decode rows alone. A row that ended with an error counts nowhere.

    Tokens count as they were verified: also those behind an output's end, which are dropped.
    """

    num_speculative_tokens: int
    steps: dict[int, int] = field(init=False)
    """Number of drafts per row, 0 or k, as it was run -> steps with decode rows."""
    steps_without_draft: int = 0
    """Of the steps that were run with 0 drafts, those that asked for k, and no row had one."""
    rows_with_drafts: int = 0
    rows_without_draft: int = 0
    """Rows in steps that asked for drafts, which had none."""
    tokens: int = 0
    """Tokens that decode rows gained."""
    tokens_with_drafts: int = 0
    """Of those, what the rows that had drafts gained: the accepted drafts, and one token more for each row."""
    proposed: list[int] = field(init=False)
    """Per position 1 to k: rows that had a draft there."""
    reached: list[int] = field(init=False)
    """Of those, the rows whose drafts before that position were all accepted."""
    accepted: list[int] = field(init=False)
    """Of those, the rows whose draft there was accepted too."""

    def __post_init__(self) -> None:
        self.steps = dict.fromkeys((0, self.num_speculative_tokens), 0)
        self.proposed, self.reached, self.accepted = ([0] * self.num_speculative_tokens for _ in range(3))

    def count(self, batch: Batch, result: StepResult) -> None:
        """Takes in a step that succeeded."""
        if not batch.num_drafts:
            tokens = sum(len(row.token_ids) for row in result.rows[: batch.num_decode_rows])
            self.steps[0] += tokens > 0
            self.tokens += tokens
            return
        rows = [row for row in result.rows[: batch.num_decode_rows] if row.error is None]
        if not rows:
            return
        num_drafts = batch.num_drafts if any(row.num_drafts for row in rows) else 0
        self.steps[num_drafts] += 1
        self.steps_without_draft += num_drafts < batch.num_drafts
        for row in rows:
            self.tokens += len(row.token_ids)
            if row.num_drafts:
                self._count_drafts(row.num_drafts, len(row.token_ids))
            elif batch.num_drafts:
                self.rows_without_draft += 1

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the rates that follow; None where nothing was counted that they could be of."""
        proposed, accepted = sum(self.proposed), sum(self.accepted)
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "steps": {str(num_drafts): steps for num_drafts, steps in self.steps.items()},
            "steps_without_draft": self.steps_without_draft,
            "rows_with_drafts": self.rows_with_drafts,
            "rows_without_draft": self.rows_without_draft,
            "tokens": self.tokens,
            "drafts_proposed": proposed,
            "drafts_accepted": accepted,
            "acceptance": _share(accepted, proposed),
            "tokens_per_row_with_drafts": _share(self.tokens_with_drafts, self.rows_with_drafts),
            "positions": [
                {"proposed": of_all, "reached": reached, "accepted": right, "acceptance": _share(right, reached)}
                for of_all, reached, right in zip(self.proposed, self.reached, self.accepted, strict=True)
            ],
        }

    def _count_drafts(self, num_drafts: int, num_tokens: int) -> None:
        """Takes in a row with drafts, of which all but the last of its `num_tokens` tokens are."""
        self.rows_with_drafts += 1
        self.tokens_with_drafts += num_tokens
        num_accepted = num_tokens - 1
        for index in range(num_drafts):
            self.proposed[index] += 1
            self.reached[index] += index <= num_accepted
            self.accepted[index] += index < num_accepted


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
