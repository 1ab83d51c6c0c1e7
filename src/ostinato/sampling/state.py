"""Sampling state of one request, as its rows have it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from ostinato.ops.seeds import derive_seed
from ostinato.sampling.grammar import Grammar, GrammarState
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import HiddenStatePooler


class TokenCounts:
    """Tokens that a request has seen, with the number of times in its output; updated at O(new tokens).

    It depends on the prompt and the output alone, so preemption does not disturb it.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        prompt = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._index = {int(token): place for place, token in enumerate(prompt)}
        self._ids = prompt
        self._counts = np.zeros(len(prompt), dtype=np.float32)
        self._num_output = 0

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the output tokens that were added since the last call; output never shrinks."""
        for token in output_token_ids[self._num_output :]:
            place = self._index.setdefault(token, len(self._index))
            if place >= len(self._ids):
                size = max(64, 2 * place)
                self._ids = np.resize(self._ids, size)
                self._counts = np.concatenate([self._counts, np.zeros(size - len(self._counts), np.float32)])
            self._ids[place] = token
            self._counts[place] += 1
        self._num_output = len(output_token_ids)

    def seen(self, ahead: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens of prompt and output, [seen] int64, and their output counts, [seen] float32.

        `ahead` counts as output in the result; the stored counts do not change.
        """
        index, num_seen = self._index, len(self._index)
        ids, counts = self._ids[:num_seen], self._counts[:num_seen]
        if not ahead:
            return ids, counts
        unseen = list(dict.fromkeys(token for token in ahead if token not in index))
        ids = np.concatenate([ids, np.asarray(unseen, dtype=np.int64)])
        counts = np.concatenate([counts, np.zeros(len(unseen), np.float32)])
        for token in ahead:
            counts[index[token] if token in index else num_seen + unseen.index(token)] += 1
        return ids, counts


class SamplingState:
    """Parameters, seed and tokens of one request, as in `BatchRow.sampling_state`.

    `prompt_token_ids` and `output_token_ids` are the request's own lists, read and never written here. `eos_token_ids`
    are the model's end tokens, which `min_tokens` holds back. For `n` outputs there are n requests, the i-th with
    `sample_index` i and all with the same `seed`, which is the one of `params` if these contain one.
    """

    __slots__ = (
        "__weakref__",
        "_counts",
        "draw_settings",
        "guidance",
        "is_greedy",
        "needs_no_processing",
        "num_lookback_outputs",
        "only_samples",
        "output_token_ids",
        "params",
        "pooler",
        "prompt_token_ids",
        "seed",
        "suppressed_token_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Collection[int] = (),
        sample_index: int = 0,
        *,
        seed: int,
        grammar: Grammar | None = None,
        pooler: HiddenStatePooler | None = None,
    ) -> None:
        self.params = params
        self.pooler = pooler
        """Pooling of a request for an embedding."""
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self.seed = derive_seed(seed, sample_index)
        self.suppressed_token_ids = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
        self.guidance = None if grammar is None else GrammarState(grammar, output_token_ids)
        guided = self.guidance is not None
        self.needs_no_processing = not (
            params.logit_bias or params.has_penalties or self.suppressed_token_ids or guided
        )
        """True if no step has to process its logits before temperature."""
        self.only_samples = self.needs_no_processing and params.logprobs is None and params.prompt_logprobs is None
        """True if every token is simply sampled from the logits, and no log-probability is asked for."""
        always = guided or params.has_penalties
        self.num_lookback_outputs = sys.maxsize if always else params.min_tokens if self.suppressed_token_ids else 0
        """Number of outputs that are sampled depending on those before them."""
        self.is_greedy = params.greedy
        self.draw_settings = params.draw_settings
        self._counts: TokenCounts | None = None

    def counts(self) -> TokenCounts:
        """Return the counts of the tokens seen so far, up to the present output."""
        if self._counts is None:
            self._counts = TokenCounts(self.prompt_token_ids)
        self._counts.update(self.output_token_ids)
        return self._counts


class PendingToken(NamedTuple):
    """One token to be sampled for a request.

    It is at `position`, which selects its noise. Its logits are processed as if the output ended with `drafts`, tokens
    guessed after the request's output; nothing that is kept for the request includes these.
    """

    state: SamplingState
    position: int
    drafts: tuple[int, ...] = ()

    @property
    def needs_no_processing(self) -> bool:
        """True if its logits need no processing before temperature."""
        if self.state.needs_no_processing:
            return True
        params = self.state.params
        guided = self.state.guidance is not None
        return not (params.logit_bias or params.has_penalties or guided or self.suppresses_stops)

    @property
    def suppresses_stops(self) -> bool:
        """True if end tokens are still ruled out by `min_tokens`."""
        state = self.state
        return (
            bool(state.suppressed_token_ids)
            and len(state.output_token_ids) + len(self.drafts) < state.params.min_tokens
        )
