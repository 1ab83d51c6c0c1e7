"""Drafts that are right with a chosen probability, to measure what speculation costs and gives on any model.

No method of users: `ostinato bench speculative --draft-accuracy` puts it in place of an engine's own.
"""

from __future__ import annotations

from ostinato.ops import noise
from ostinato.sample.params import SamplingParams
from ostinato.sample.state import SamplingState
from ostinato.schedule.batch import Batch, Row
from ostinato.speculate.proposer import Proposer

_BIAS = 100.0


def forced_params(token: int, seed: int, max_tokens: int) -> SamplingParams:
    """Greedy sampling that gives `token` again and again, whatever the model says. So it is known what is right.

    The model computes as much as for any text, except where experts are chosen by the text.
    """
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=seed, logit_bias={token: _BIAS}
    )  # fmt: skip


class MeasuredProposer:
    """Drafts for requests with `forced_params`, each right with probability `accuracy` if those before it are.

    The draws depend on a request's seed and the draft's position alone. `behind` makes its drafts besides, which are
    thrown away: so a step takes the time of its method.
    """

    def __init__(self, accuracy: float, vocab_size: int, behind: Proposer) -> None:
        self._accuracy = accuracy
        self._vocab_size = vocab_size
        self._behind = behind

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        self._behind.propose(batch)
        return [self._drafts(row) if row.num_drafts else () for row in batch.rows]

    def _drafts(self, row: Row) -> tuple[int, ...]:
        state: SamplingState = row.payload
        token = next(iter(state.params.logit_bias or ()))
        wrong = (token + 1) % self._vocab_size
        words = noise.keys([(state.seed, row.end + i) for i in range(row.num_drafts)])[:, 0].tolist()
        return tuple(token if word % 2**32 / 2**32 < self._accuracy else wrong for word in words)
