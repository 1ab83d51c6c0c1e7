"""Drafts by another rule in place of an engine's own: to try speculation, or to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ostinato.engine.run.runner import ModelRunner
from ostinato.sample.sampler import SampleKernel
from ostinato.sample.state import PendingToken, SamplingState
from ostinato.schedule.batch import Batch, BatchRow
from ostinato.speculate.proposer import TokenSelector, Proposer


class DraftOverride(Protocol):
    """Rule that replaces drafts."""

    def token(self, state: SamplingState, position: int, own: int, /) -> int:
        """Return the token to use instead of the draft `own` at a position of a request."""
        ...

    def drafts(self, row: BatchRow, own: tuple[int, ...], /) -> Sequence[int]:
        """Return the drafts to use instead of `own` for a batch row: at most its `num_drafts`."""
        ...


def override_drafts(runner: ModelRunner, steering: DraftOverride) -> None:
    """Replace the runner's drafts by those of `steering`; nothing without speculation.

    A drafter that runs layers is steered where each draft is sampled. So it takes its usual time and continues from the
    replaced draft, on all ranks.
    """
    if runner.drafter is None:
        return
    if runner.drafter.runs_layers:
        runner.tensor_parallel.draft_selector = OverriddenSelector(runner.tensor_parallel.draft_selector, steering)
    else:
        runner.drafter = replace(runner.drafter, proposer=OverriddenProposer(runner.drafter.proposer, steering))


class OverriddenSelector:
    """Another sampler's drafts, each replaced by `steering`."""

    def __init__(self, choose: TokenSelector, steering: DraftOverride) -> None:
        self._choose, self._steering = choose, steering

    def __call__(self, logits: torch.Tensor, picks: Sequence[PendingToken], draw: SampleKernel) -> dict[int, int]:
        """Sample tokens like `sample.sampler.choose`."""
        chosen = self._choose(logits, picks, draw)
        return {
            place: self._steering.token(picks[place].state, picks[place].position, own) for place, own in chosen.items()
        }


class OverriddenProposer:
    """Another proposer's drafts, each row's replaced by `steering`."""

    def __init__(self, proposer: Proposer, steering: DraftOverride) -> None:
        self._proposer, self._steering = proposer, steering

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        return [
            tuple(self._steering.drafts(row, own)) if row.num_drafts else ()
            for row, own in zip(batch.rows, self._proposer.propose(batch), strict=True)
        ]
