"""What every maker of drafts does, and what those that run layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ostinato.sample.sampler import Draw
from ostinato.sample.state import Pick
from ostinato.schedule.batch import Batch, Row

Choose = Callable[[torch.Tensor, Sequence[Pick], Draw], dict[int, int]]
"""As `sample.sampler.choose`."""

Forward = Callable[[Batch], torch.Tensor]
"""Runs a batch through what makes drafts -> hidden states of its tokens, [tokens or more, hidden]."""


class Steps(Protocol):
    """Runs steps of one token per row through layers that have no slots, one behind the other."""

    def first(self, batch: Batch) -> torch.Tensor:
        """The step of a batch -> as `Forward`."""
        ...

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """The step behind the last one, of the same rows, whose tokens these are -> as `Forward`."""
        ...


class Proposer(Protocol):
    """Guesses, at the start of a step, the tokens that the step is to verify."""

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        """The drafts of each row of the batch, in its order: at most `Row.num_drafts`, none for a prefill row.

        Called for every step of the model before it, also for one without drafts: a proposer whose layers have a part
        in blocks and slots computes there what belongs to the batch's tokens.
        """
        ...


def token_row(row: Row, token: int, depth: int) -> Row:
    """`row`, computing one token alone: its own at depth 0, else the draft `depth` positions behind that.

    The state goes from write slot to write slot, beginning at the read slot.
    """
    slots = (row.read_slot, *row.write_slots)
    read, write = (slots[depth], slots[depth + 1]) if depth + 1 < len(slots) else (0, 0)
    return row._replace(token_ids=(token,), start=row.start + depth, read_slot=read, write_slots=(write,), num_drafts=0)
