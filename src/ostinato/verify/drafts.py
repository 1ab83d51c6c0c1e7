"""Drafts for verification: some right, some wrong, so that every anchor occurs, however good a drafter is."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.ops.seeds import mix64
from ostinato.sample.state import SamplingState
from ostinato.schedule.batch import BatchRow
from ostinato.verify.plain import ReferenceCase

WRONG, RIGHT = 1, 2
"""Numbers of positions, out of every five, whose draft is made wrong and made right."""


class ReferenceDrafts:
    """Steering that corrects and misleads drafts with the plain path's tokens.

    The outcome for a draft depends on position and prefix alone, so it is the same whenever the prefix comes.
    """

    def __init__(self, vocab_size: int, cases: Sequence[ReferenceCase]) -> None:
        self._vocab_size = vocab_size
        self._tokens = {(case.params.greedy, case.prompt): case.tokens for case in cases}

    def token(self, state: SamplingState, position: int, own: int) -> int:
        right = self._right(state, position)
        return self._steered(position, own, right[0] if right else None)

    def drafts(self, row: BatchRow, own: tuple[int, ...]) -> Sequence[int]:
        """Return steered drafts; if the row has room for more than `own`, right ones are sometimes added."""
        right = self._right(row.sampling_state, row.end)
        # Half of the rows whose drafter finds nothing get no draft.
        count = max(len(own), len(right)) if mix64(row.end) % 2 else len(own)
        steered = []
        for place in range(min(count, row.num_drafts)):
            known = right[place] if place < len(right) else None
            found = own[place] if place < len(own) else right[place]
            steered.append(self._steered(row.end + place, found, known))
        return steered

    def _steered(self, position: int, own: int, right: int | None) -> int:
        """Return the draft for a position in place of `own`; `right` is the right token, if it is known."""
        known = own if right is None else right
        dice = mix64(position) % 5
        changed = (known + 1) % self._vocab_size if dice < WRONG else known
        return changed if dice < WRONG + RIGHT else own

    def _right(self, state: SamplingState, position: int) -> tuple[int, ...]:
        """Return the plain path's tokens from a position on, as far as they are known."""
        prompt = tuple(state.prompt_token_ids)
        return self._tokens.get((state.params.greedy, prompt), ())[position - len(prompt) :]
