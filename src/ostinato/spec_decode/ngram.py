"""Drafts from the request's own tokens: the continuation of the last earlier occurrence of its latest n-gram."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ostinato.sampling.state import SamplingState
from ostinato.scheduler.batch import Batch

# Token ids are below 2**32.
_TOKEN_BITS = 32


class NgramProposer:
    """Proposer that looks up a request's last tokens among its earlier tokens.

    It takes the longest suffix, of `lookup_max` down to `lookup_min` tokens, that occurred before, and its last earlier
    occurrence. It proposes the tokens that followed there. If these reach the end of the request's tokens, it continues
    with the proposed ones, as if the text repeated itself.
    """

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        assert 1 <= lookup_min <= lookup_max, "lengths to look up go from 1 or more to no less than that"
        self.lookup_min = lookup_min
        self.lookup_max = lookup_max
        # An index lasts as long as its request, which a step of prompts alone does not end.
        self._indexes: WeakKeyDictionary[SamplingState, _NgramIndex] = WeakKeyDictionary()

    def propose(self, batch: Batch) -> list[tuple[int, ...]]:
        """Return the drafts of each row in the batch's order: up to `BatchRow.num_drafts`, none for a prefill row.

        The sampling state of a decode row is in its `sampling_state`. The cost is O(new tokens since the last call),
        which the first time are all.
        """
        drafts: list[tuple[int, ...]] = [()] * len(batch.rows)
        for i, row in enumerate(batch.rows[: batch.num_decode_rows]):
            state: SamplingState = row.sampling_state
            index = self._indexes.get(state)
            if index is None:
                index = self._indexes[state] = _NgramIndex(state, self.lookup_min, self.lookup_max)
            if row.num_drafts:
                drafts[i] = index.continuation(row.num_drafts)
        return drafts


class _NgramIndex:
    """A request's prompt and output, and the last position where each of its n-grams ended, except at the very end."""

    def __init__(self, state: SamplingState, lookup_min: int, lookup_max: int) -> None:
        self._output = state.output_token_ids
        self._lookup_min = lookup_min
        self._lookup_max = lookup_max
        self._tokens: list[int] = list(state.prompt_token_ids)
        self._num_prompt = len(self._tokens)
        self._num_indexed = 0
        """Every n-gram that ends at this position or before it is in `_ends`."""
        self._ends: dict[int, int] = {}
        """Key of an n-gram -> the position after its last token."""

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens to follow; none if the last n-gram is new."""
        tokens = self._tokens
        tokens += self._output[len(tokens) - self._num_prompt :]
        for end in range(self._num_indexed + 1, len(tokens)):
            for key in self._keys(end):
                self._ends[key] = end
        self._num_indexed = len(tokens) - 1
        start = next((self._ends[key] for key in reversed(self._keys(len(tokens))) if key in self._ends), None)
        if start is None:
            return ()
        next_tokens: Sequence[int] = tokens[start : start + max_tokens]
        return tuple(next_tokens[i % len(next_tokens)] for i in range(max_tokens))

    def _keys(self, end: int) -> list[int]:
        """Return a number that encodes each n-gram ending at this position, the shortest first."""
        key, keys = 1, []
        for length in range(1, min(self._lookup_max, end) + 1):
            key = key << _TOKEN_BITS | self._tokens[end - length]
            if length >= self._lookup_min:
                keys.append(key)
        return keys
