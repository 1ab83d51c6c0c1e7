"""How many tokens a row gains by drafts, from those that were right of late. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

# What one step leaves of the weight of those before it: about 33 steps count. With 0.99, a change of the text is
# followed too late; with 0.9, chance at one row is taken for one.
_KEPT_WEIGHT = 0.97
# Before anything is known, so many rows count as having shown this share of right drafts.
_ASSUMED_ROWS, _ASSUMED_SHARE = 1.0, 0.5


class Acceptance:
    """By position, the share of drafts that are right if those before them are.

    It depends on the text alone, and is kept for all batch sizes together. A row for which no draft was found counts
    as one whose drafts were wrong: it gains as much.
    """

    def __init__(self, most: int) -> None:
        """`most` is the largest number of drafts per row."""
        self._reached = [0.0] * most
        self._kept = [0.0] * most

    def count(self, kept: Sequence[int], num_drafts: int) -> None:
        """A step that asked for `num_drafts` per row: how many each row kept that had room for them."""
        if not kept:
            return
        for i in range(len(self._reached)):
            self._reached[i] = _KEPT_WEIGHT * self._reached[i] + (i < num_drafts) * sum(each >= i for each in kept)
            self._kept[i] = _KEPT_WEIGHT * self._kept[i] + (i < num_drafts) * sum(each > i for each in kept)

    @property
    def is_known(self) -> bool:
        """Whether any draft was counted."""
        return self._reached[0] > 0

    def tokens(self, num_drafts: int) -> float:
        """Tokens to expect of a row with so many drafts, 1 to 1 + `num_drafts`.

        Of positions that few rows have reached of late, the share is taken to be that of the one before.
        """
        tokens = probability = 1.0
        share = _ASSUMED_SHARE
        for reached, kept in zip(self._reached[:num_drafts], self._kept[:num_drafts], strict=True):
            share = (kept + _ASSUMED_ROWS * share) / (reached + _ASSUMED_ROWS)
            probability *= share
            tokens += probability
        return tokens
