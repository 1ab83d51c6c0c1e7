"""Use of a step's hidden states: their logits, chunk by chunk, and the vectors of requests for an embedding."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ostinato.models.base import CausalLM
from ostinato.ops.arrays import Collectives, host_values, is_on_host, library
from ostinato.ops.step_inputs import Array
from ostinato.plan.memory.activations import PROMPT_POSITIONS
from ostinato.plan.tensor_parallel import Rank
from ostinato.runner.inputs import Drafts
from ostinato.scheduler.batch import Batch

if TYPE_CHECKING:
    from ostinato.sampling.pooler import HiddenStatePooler
    from ostinato.sampling.state import SamplingState


class LogitPositions(NamedTuple):
    """Indices of the step's tokens whose logits are needed."""

    sampled: list[int]
    """Last known token of each row that samples, followed by its drafts."""
    scored: list[int]
    """Prompt tokens before those whose log-probabilities were asked for."""

    def chunks(self) -> Iterator[list[int]]:
        """Yield the positions whose logits are computed together: all sampled ones, then the scored ones in parts."""
        if self.sampled:
            yield self.sampled
        for start in range(0, len(self.scored), PROMPT_POSITIONS):
            yield self.scored[start : start + PROMPT_POSITIONS]


def logit_positions(batch: Batch, drafts: Drafts = ()) -> LogitPositions:
    """Return the positions with logits in a step with these drafts. All ranks derive the same ones."""
    if batch.num_decode_rows == len(batch.rows) and not any(drafts):
        return LogitPositions(list(range(len(batch.rows))), [])  # one token each
    sampled: list[int] = []
    scored: list[int] = []
    has_drafts = any(drafts)
    start = 0
    for i, row in enumerate(batch.rows):
        end = start + len(row.token_ids)
        if row.samples:
            sampled.extend(range(end - 1, end + (len(drafts[i]) if has_drafts else 0)))
        if row.num_scored:
            scored.extend(range(end - row.num_logits, end - row.num_logits + row.num_scored))
        start = end + (batch.num_drafts if has_drafts and i < batch.num_decode_rows else 0)
    return LogitPositions(sampled, scored)


class RankGroup(Collectives, Protocol):
    """Connection of a rank with the others."""

    @property
    def rank(self) -> Rank: ...


class LogitRanks(Protocol):
    """The ranks that compute logits together."""

    @property
    def group(self) -> RankGroup | None:
        """Connection of the ranks; None for a single rank."""

    def logits(self) -> AbstractContextManager[None]:
        """Return the context in which this rank computes its part of a chunk, and the other ranks theirs."""


class Logits:
    """Logits of a step, computed chunk by chunk, since all of them together may not fit into memory."""

    def __init__(self, model: CausalLM, hidden: Array, positions: LogitPositions, ranks: LogitRanks) -> None:
        """Compute nothing yet. `hidden` [tokens, hidden] are the step's hidden states, with or without padding."""
        self._model, self._hidden, self._ranks = model, hidden, ranks
        self._chunks = deque(positions.chunks())

    def next_chunk(self) -> Array:
        """Compute the logits of the next chunk of `LogitPositions`: [positions, vocab] float32 on the first rank."""
        positions = self._chunks.popleft()
        try:
            with self._ranks.logits():
                return self._model.compute_logits(_select_positions(self._hidden, positions))
        except BaseException:
            self._chunks.clear()  # no other rank waits any more: an error here ends all of them
            raise

    def finish(self) -> None:
        """Compute the chunks that the sampler has left, if other ranks wait in them."""
        while self._chunks and self._ranks.group is not None:
            self.next_chunk()


def _select_positions(hidden: Array, positions: list[int]) -> Array:
    """Return the hidden states at some positions."""
    # If every row has one token, all are wanted in order, and no copy is needed.
    if positions != list(range(len(positions))):
        return hidden[positions]
    return hidden if len(positions) == hidden.shape[0] else hidden[: len(positions)]


def pool_rows(hidden: Array, batch: Batch, drafts: Drafts = ()) -> None:
    """Add a step's hidden states [tokens, hidden] of `execute_model` to the pool of each batch row that has one."""
    states: list[SamplingState | None] = [row.sampling_state for row in batch.rows]
    pools = [None if state is None else state.pooler for state in states]
    if not any(pools):  # almost every step has none
        return
    pooled: list[tuple[HiddenStatePooler, int, int]] = []
    vectors: list[Array] = []
    has_drafts = any(drafts)
    begin = 0
    for i, (row, pool) in enumerate(zip(batch.rows, pools, strict=True)):
        end = begin + len(row.token_ids)
        if pool is not None and (pool.kind == "mean" or row.samples):
            pooled.append((pool, row.start, end - begin))
            vectors.append(_sum(hidden[begin:end]) if pool.kind == "mean" else _wide(hidden[end - 1]))
        begin = end + (batch.num_drafts if has_drafts and i < batch.num_decode_rows else 0)
    if pooled:
        for (pool, start, count), vector in zip(pooled, _on_host(vectors), strict=True):
            pool.add(vector, start, count)


def _sum(hidden: Array) -> Array:
    """Return the sum over tokens, in float64, so that neither chunks nor the order of adding change the mean's bits."""
    total: Array = _wide(hidden).sum(0)
    return total


def _wide(hidden: Array) -> Array:
    return hidden.astype(np.float64) if isinstance(hidden, np.ndarray) else hidden.double()


def _on_host(vectors: list[Array]) -> Iterable[np.ndarray]:
    """Return vectors on the host, all at once, since each wait for a device takes its time."""
    if all(map(is_on_host, vectors)):
        return map(host_values, vectors)
    return list(host_values(library(vectors[0]).stack(vectors)))
