"""What every maker of drafts does."""

from __future__ import annotations

from typing import Protocol

from ostinato.schedule.batch import Batch


class Proposer(Protocol):
    """Guesses, at the start of a step, the tokens that the step is to verify."""

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        """The drafts of each row of the batch, in its order: at most `Row.num_drafts`, none for a prefill row.

        Called for every step of the model before it, also for one without drafts: a proposer whose layers have a part
        in blocks and slots computes there what belongs to the batch's tokens.
        """
        ...
