"""Logits of a step for tests of the sampler: a table in place of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.plan.memory.activations import PROMPT_POSITIONS
from ostinato.runner.step_logits import LogitPositions
from ostinato.scheduler.batch import BatchRow


class LogitTable:
    """Logits by position, in the chunks that the runner would compute.

    `logits` has a line for each position with logits, rows in order: of each row its `num_logits - num_drafts` known
    tokens, then the drafts that it was given.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[BatchRow], drafts: Sequence[tuple[int, ...]] = ()) -> None:
        sampled: list[int] = []
        scored: list[int] = []
        begin = 0
        for row, ahead in zip(rows, drafts or [()] * len(rows), strict=True):
            end = begin + row.num_logits - row.num_drafts
            scored += range(begin, begin + row.num_scored)
            begin = end + len(ahead)
            if row.samples:
                sampled += range(end - 1, begin)
        assert begin <= len(logits)
        self._logits = logits
        self.chunks = list(LogitPositions(sampled, scored).chunks())
        assert all(len(chunk) <= PROMPT_POSITIONS for chunk in self.chunks[bool(sampled) :])

    def next_chunk(self) -> torch.Tensor:
        return self._logits[self.chunks.pop(0)]
