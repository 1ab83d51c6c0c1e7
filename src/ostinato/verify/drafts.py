"""Drafts as verification needs them: some right, some wrong, so that every anchor occurs, however good a drafter is."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.ops.seeds import mix64
from ostinato.sample.state import SamplingState
from ostinato.schedule.batch import Row
from ostinato.verify.plain import Case

WRONG, RIGHT = 1, 2
"""Of every five positions: those whose draft is made wrong, and those whose draft is made right."""


class PlainSteering:
    """Corrects and misleads drafts by what the plain path says. What becomes of one depends on the text alone, so it is
    drafted alike whenever it comes."""

    def __init__(self, vocab_size: int, cases: Sequence[Case]) -> None:
        self._vocab_size = vocab_size
        self._tokens = {(case.params.greedy, case.prompt): case.tokens for case in cases}

    def token(self, state: SamplingState, position: int, own: int) -> int:
        right = self._right(state, position)
        return self._steered(position, own, right[0] if right else None)

    def drafts(self, row: Row, own: tuple[int, ...]) -> Sequence[int]:
        """Where fewer were found than the row has room for, right ones are added now and then."""
        right = self._right(row.payload, row.end)
        # Of rows whose drafter finds nothing, half get none.
        count = max(len(own), len(right)) if mix64(row.end) % 2 else len(own)
        steered = []
        for place in range(min(count, row.num_drafts)):
            known = right[place] if place < len(right) else None
            found = own[place] if place < len(own) else right[place]
            steered.append(self._steered(row.end + place, found, known))
        return steered

    def _steered(self, position: int, own: int, right: int | None) -> int:
        """In place of the draft `own` for a position of a text, where `right` would be right if that is known."""
        known = own if right is None else right
        dice = mix64(position) % 5
        changed = (known + 1) % self._vocab_size if dice < WRONG else known
        return changed if dice < WRONG + RIGHT else own

    def _right(self, state: SamplingState, position: int) -> tuple[int, ...]:
        """The plain path's tokens from a position on, as far as they are known."""
        prompt = tuple(state.prompt_token_ids)
        return self._tokens.get((state.params.greedy, prompt), ())[position - len(prompt) :]
