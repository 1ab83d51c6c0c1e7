"""Interface of all proposers of drafts, and the parts that proposers with layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ostinato.sample.sampler import Draw
from ostinato.sample.state import Pick
from ostinato.schedule.batch import Batch, Row

Choose = Callable[[torch.Tensor, Sequence[Pick], Draw], dict[int, int]]
"""Function that samples tokens, with the signature of `sample.sampler.choose`."""

Forward = Callable[[Batch], torch.Tensor]
"""Function that runs a batch through a drafter -> hidden states of its tokens, [tokens or more, hidden]."""


class Steps(Protocol):
    """Runner of consecutive steps of one token per row, through layers that have no slots."""

    def first(self, batch: Batch) -> torch.Tensor:
        """Run the first step, of a batch; returns hidden states as `Forward`."""
        ...

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run the next step of the same rows with these tokens; returns hidden states as `Forward`."""
        ...


class Proposer(Protocol):
    """Source of draft tokens: it guesses, at the start of a step, the tokens that the step will verify."""

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        """Return the drafts of each row in the batch's order: up to `Row.num_drafts`, none for a prefill row.

        Called before every step of the model, even one without drafts: a proposer with layers writes their part of the
        blocks and slots for the batch's tokens.
        """
        ...


def token_row(row: Row, token: int, depth: int) -> Row:
    """Return `row` for one token alone: its own at depth 0, else the draft `depth` positions after that.

    The state moves from write slot to write slot, beginning at the read slot.
    """
    slots = (row.read_slot, *row.write_slots)
    read, write = (slots[depth], slots[depth + 1]) if depth + 1 < len(slots) else (0, 0)
    return row._replace(token_ids=(token,), start=row.start + depth, read_slot=read, write_slots=(write,), num_drafts=0)
