"""Drafts that are right with a chosen probability, to measure what speculation costs and gives on any model.

No method of users, and no setting leads to it: `ostinato bench speculative --accept` puts it in place of an engine's
own. It refuses every request that the benchmark has not made.
"""

from __future__ import annotations

from ostinato.errors import RequestError
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
    """Drafts for requests with `forced_params`, each right with probability `accept` if those before it are.

    The draws depend on a request's seed and the draft's position alone. `behind` makes its drafts besides, which are
    thrown away: so a step takes the time of its method.
    """

    def __init__(self, accept: float, vocab_size: int, behind: Proposer) -> None:
        self._accept = accept
        self._vocab_size = vocab_size
        self._behind = behind

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        """RequestError for a batch with a request that is no measurement: what it gets here is no speculation."""
        tokens = [_forced_token(row) for row in batch.rows]
        self._behind.propose(batch)
        return [
            self._drafts(row, token) if row.num_drafts else () for row, token in zip(batch.rows, tokens, strict=True)
        ]

    def _drafts(self, row: Row, token: int) -> tuple[int, ...]:
        state: SamplingState = row.payload
        wrong = (token + 1) % self._vocab_size
        words = noise.keys([(state.seed, row.end + i) for i in range(row.num_drafts)])[:, 0].tolist()
        return tuple(token if word % 2**32 / 2**32 < self._accept else wrong for word in words)


def _forced_token(row: Row) -> int:
    """The token that the row's request repeats. RequestError if it is not bound to one."""
    state: SamplingState = row.payload
    [*forced] = (token for token, bias in (state.params.logit_bias or {}).items() if bias == _BIAS)
    if len(forced) != 1:
        raise RequestError(
            f"request {row.request_id} is none of the benchmark's, and the drafts of this engine measure speed alone; "
            "serve with speculative ngram, mtp or draft"
        )
    return forced[0]
