"""Counts of drafts: how many were proposed, and how many were accepted at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of the drafts of decode rows. A row that ended with an error is not counted.

    Tokens count as they were verified, including those after an output's end, which are dropped.
    """

    num_speculative_tokens: int
    draft_numbers: tuple[int, ...]
    """The numbers of drafts that a step may have."""
    steps: dict[int, int] = field(init=False)
    """Number of drafts per row that ran -> steps with decode rows."""
    steps_without_draft: int = 0
    """Steps that asked for drafts and ran with 0, because no row had one."""
    rows_with_drafts: int = 0
    rows_without_draft: int = 0
    """Rows without a draft in steps that asked for drafts."""
    tokens: int = 0
    """New tokens of decode rows."""
    tokens_with_drafts: int = 0
    """The part of `tokens` from rows with drafts: the accepted drafts, and one more token for each row."""
    proposed: list[int] = field(init=False)
    """Rows that had a draft at each position 1 to k."""
    reached: list[int] = field(init=False)
    """The part of `proposed` whose earlier drafts were all accepted."""
    accepted: list[int] = field(init=False)
    """The part of `reached` whose draft at that position was accepted too."""

    def __post_init__(self) -> None:
        self.steps = dict.fromkeys(self.draft_numbers, 0)
        self.proposed, self.reached, self.accepted = ([0] * self.num_speculative_tokens for _ in range(3))

    def count(self, num_drafts: int, rows: Sequence[tuple[int, int]]) -> None:
        """Add a step that succeeded and asked for `num_drafts`.

        `rows` has (drafts, new tokens) of each decode row without an error.
        """
        if not rows:
            return
        drafts_run = num_drafts if any(drafts for drafts, _ in rows) else 0
        self.steps[drafts_run] += 1
        self.steps_without_draft += drafts_run < num_drafts
        for drafts, tokens in rows:
            self.tokens += tokens
            if drafts:
                self._count_drafts(drafts, tokens)
            elif num_drafts:
                self.rows_without_draft += 1

    def to_json(self) -> dict[str, Any]:
        """Return the counts and the rates that follow from them as plain data; a rate without a denominator is None."""
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
        """Add a row with drafts. All but the last of its `num_tokens` tokens are accepted drafts."""
        self.rows_with_drafts += 1
        self.tokens_with_drafts += num_tokens
        num_accepted = num_tokens - 1
        for index in range(num_drafts):
            self.proposed[index] += 1
            self.reached[index] += index <= num_accepted
            self.accepted[index] += index < num_accepted


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
