"""Interface of all proposers of drafts, and the parts that proposers with layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ostinato.sample.sampler import SampleKernel
from ostinato.sample.state import PendingToken
from ostinato.schedule.batch import Batch, BatchRow

TokenSelector = Callable[[torch.Tensor, Sequence[PendingToken], SampleKernel], dict[int, int]]
"""Function that samples tokens, with the signature of `sample.sampler.choose`."""

RunDraftBatch = Callable[[Batch], torch.Tensor]
"""Function that runs a batch through a drafter -> hidden states of its tokens, [tokens or more, hidden]."""


class HeadStepRunner(Protocol):
    """Runner of consecutive steps of one token per row, through layers that have no slots."""

    def first(self, batch: Batch) -> torch.Tensor:
        """Run the first step, of a batch; returns hidden states as `RunDraftBatch`."""
        ...

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run the next step of the same rows with these tokens; returns hidden states as `RunDraftBatch`."""
        ...


class Proposer(Protocol):
    """Source of draft tokens: it guesses, at the start of a step, the tokens that the step will verify."""

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        """Return the drafts of each row in the batch's order: up to `BatchRow.num_drafts`, none for a prefill row.

        Called before every step of the model, even one without drafts: a proposer with layers writes their part of the
        blocks and slots for the batch's tokens.
        """
        ...


def single_token_row(row: BatchRow, token: int, depth: int) -> BatchRow:
    """Return `row` for one token alone: its own at depth 0, else the draft `depth` positions after that.

    The state moves from write slot to write slot, beginning at the read slot.
    """
    slots = (row.read_slot, *row.write_slots)
    read, write = (slots[depth], slots[depth + 1]) if depth + 1 < len(slots) else (0, 0)
    return row._replace(token_ids=(token,), start=row.start + depth, read_slot=read, write_slots=(write,), num_drafts=0)
