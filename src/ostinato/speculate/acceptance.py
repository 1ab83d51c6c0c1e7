"""Estimate of the tokens that a row gains from drafts, by the drafts accepted of late. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

# Decay of the weight of earlier steps: about 33 steps count. With 0.99 the estimate follows a change of the text too
# late; with 0.9 it takes chance at a single row for a change.
_KEPT_WEIGHT = 0.97
# Prior: this number of rows with this share of right drafts.
_ASSUMED_ROWS, _ASSUMED_SHARE = 1.0, 0.5


class AcceptanceRates:
    """The share of right drafts at each position, if the drafts before it are right.

    It depends on the text alone, so all batch sizes share it. A row for which no draft was found counts as one whose
    drafts were wrong: both gain nothing.
    """

    def __init__(self, most: int) -> None:
        """Start without observations; `most` is the largest number of drafts per row."""
        self._reached = [0.0] * most
        self._kept = [0.0] * most

    def count(self, kept: Sequence[int], num_drafts: int) -> None:
        """Count a step that asked for `num_drafts` drafts per row.

        `kept` is the number of accepted drafts of each row that had room for them.
        """
        if not kept:
            return
        for i in range(len(self._reached)):
            self._reached[i] = _KEPT_WEIGHT * self._reached[i] + (i < num_drafts) * sum(each >= i for each in kept)
            self._kept[i] = _KEPT_WEIGHT * self._kept[i] + (i < num_drafts) * sum(each > i for each in kept)

    @property
    def is_known(self) -> bool:
        """True if any draft was counted."""
        return self._reached[0] > 0

    def tokens(self, num_drafts: int) -> float:
        """Return the expected tokens of a row with `num_drafts` drafts, 1 to 1 + `num_drafts`.

        At positions that few rows have reached of late, the share is taken from the position before.
        """
        tokens = probability = 1.0
        share = _ASSUMED_SHARE
        for reached, kept in zip(self._reached[:num_drafts], self._kept[:num_drafts], strict=True):
            share = (kept + _ASSUMED_ROWS * share) / (reached + _ASSUMED_ROWS)
            probability *= share
            tokens += probability
        return tokens
