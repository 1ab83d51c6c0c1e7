"""Drafts by another rule in place of an engine's own: to try speculation, or to measure it.

Drafts that are right with a chosen probability measure costs and gains of speculation on any model. This is not a
method for users, and no setting selects it: `ostinato bench speculative --accept` replaces an engine's own drafts by
these. They refuse every request that the benchmark has not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ostinato.errors import RequestError
from ostinato.ops.arrays import noise_keys
from ostinato.ops.step_inputs import Array
from ostinato.runner.model_runner import ModelRunner
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.sampler import SampleKernel
from ostinato.sampling.state import PendingToken, SamplingState
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.spec_decode.model_drafters import Proposer, TokenSelector


class DraftOverride(Protocol):
    """Rule that replaces drafts."""

    def token(self, state: SamplingState, position: int, own: int, /) -> int:
        """Return the token to use instead of the draft `own` at a position of a request."""

    def drafts(self, row: BatchRow, own: tuple[int, ...], /) -> Sequence[int]:
        """Return the drafts to use instead of `own` for a batch row: at most its `num_drafts`."""


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

    def __call__(self, logits: Array, pending_tokens: Sequence[PendingToken], kernel: SampleKernel) -> dict[int, int]:
        """Sample tokens like `sampling.sampler.select_tokens`."""
        chosen = self._choose(logits, pending_tokens, kernel)
        return {
            place: self._steering.token(pending_tokens[place].state, pending_tokens[place].position, own)
            for place, own in chosen.items()
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
        words = noise_keys([(state.seed, position) for position in positions])[:, 0].tolist()
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
