"""Drafts by another rule in place of an engine's own: to try speculation, or to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ostinato.engine.run.runner import Runner
from ostinato.sample.sampler import Draw
from ostinato.sample.state import Pick, SamplingState
from ostinato.schedule.batch import Batch, Row
from ostinato.speculate.proposer import Choose, Proposer


class Steering(Protocol):
    """Rule that replaces drafts."""

    def token(self, state: SamplingState, position: int, own: int, /) -> int:
        """Return the token to use instead of the draft `own` at a position of a request."""
        ...

    def drafts(self, row: Row, own: tuple[int, ...], /) -> Sequence[int]:
        """Return the drafts to use instead of `own` for a batch row: at most its `num_drafts`."""
        ...


def steer_drafts(runner: Runner, steering: Steering) -> None:
    """Replace the runner's drafts by those of `steering`; nothing without speculation.

    A drafter that runs layers is steered where each draft is sampled. So it takes its usual time and continues from the
    replaced draft, on all ranks.
    """
    if runner.drafting is None:
        return
    if runner.drafting.has_weights:
        runner.together.chooses = SteeredChoice(runner.together.chooses, steering)
    else:
        runner.drafting = replace(runner.drafting, proposer=SteeredProposer(runner.drafting.proposer, steering))


class SteeredChoice:
    """Another sampler's drafts, each replaced by `steering`."""

    def __init__(self, choose: Choose, steering: Steering) -> None:
        self._choose, self._steering = choose, steering

    def __call__(self, logits: torch.Tensor, picks: Sequence[Pick], draw: Draw) -> dict[int, int]:
        """Sample tokens like `sample.sampler.choose`."""
        chosen = self._choose(logits, picks, draw)
        return {
            place: self._steering.token(picks[place].state, picks[place].position, own) for place, own in chosen.items()
        }


class SteeredProposer:
    """Another proposer's drafts, each row's replaced by `steering`."""

    def __init__(self, proposer: Proposer, steering: Steering) -> None:
        self._proposer, self._steering = proposer, steering

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        return [
            tuple(self._steering.drafts(row, own)) if row.num_drafts else ()
            for row, own in zip(batch.rows, self._proposer.propose(batch), strict=True)
        ]
