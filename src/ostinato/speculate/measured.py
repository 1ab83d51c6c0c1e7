"""Drafts that are right with a chosen probability, to measure costs and gains of speculation on any model.

This is not a method for users, and no setting selects it: `ostinato bench speculative --accept` replaces an engine's
own drafts by these. They refuse every request that the benchmark has not made.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.errors import RequestError
from ostinato.ops import noise
from ostinato.sample.params import SamplingParams
from ostinato.sample.state import SamplingState
from ostinato.schedule.batch import BatchRow

_BIAS = 100.0


def forced_token_params(token: int, seed: int, max_tokens: int) -> SamplingParams:
    """Return parameters of greedy sampling that always gives `token`, whatever the model computes.

    So the right drafts are known. The model computes as much as for any text, except where experts are chosen by the
    text.
    """
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=seed, logit_bias={token: _BIAS}
    )  # fmt: skip


class SyntheticDrafts:
    """Source of drafts for requests with `forced_token_params`.

    Each draft is right with probability `accept` if those before it are. The random numbers depend only on a request's
    seed and the draft's position.
    """

    def __init__(self, accept: float, vocab_size: int) -> None:
        self._accept = accept
        self._vocab_size = vocab_size

    def token(self, state: SamplingState, position: int, _own: int) -> int:
        """Return the draft at `position`.

        RequestError for a request that the benchmark has not made: its drafts would be meaningless.
        """
        return self._drawn(state, range(position, position + 1))[0]

    def drafts(self, row: BatchRow, _own: tuple[int, ...]) -> Sequence[int]:
        """Return as many drafts as the row has room for. RequestError as in `token`."""
        return self._drawn(row.sampling_state, range(row.end, row.end + row.num_drafts))

    def _drawn(self, state: SamplingState, positions: Sequence[int]) -> list[int]:
        right = _forced_token(state)
        wrong = (right + 1) % self._vocab_size
        words = noise.keys([(state.seed, position) for position in positions])[:, 0].tolist()
        return [right if word % 2**32 / 2**32 < self._accept else wrong for word in words]


def _forced_token(state: SamplingState) -> int:
    """Return the token that a request repeats. RequestError if its parameters do not force one."""
    [*forced] = (token for token, bias in (state.params.logit_bias or {}).items() if bias == _BIAS)
    if len(forced) != 1:
        raise RequestError(
            "the request is none of the benchmark's, and the drafts of this engine measure speed alone; serve with "
            "speculative ngram, mtp or draft"
        )
    return forced[0]
