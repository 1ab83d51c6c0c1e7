"""Sampler: the tokens of each row of a step, verified drafts, and log-probabilities.

Log-probabilities, of known tokens and of the most likely ones, come from the model's raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ostinato.errors import ModelError, Remedy, RequestError
from ostinato.ops.arrays import Arrays, copied, host_values, is_on_host, like, like_on_host, noise_keys
from ostinato.ops.step_inputs import Array
from ostinato.plan.memory.activations import PROMPT_POSITIONS
from ostinato.sampling.logits_processing import guide_error, process_logits
from ostinato.sampling.state import PendingToken, SamplingState
from ostinato.scheduler.batch import BatchRow, RowResult, TokenLogprobs

# Number of logits that are normalised at a time, as their log-probabilities are a copy.
_MAX_LOGITS_AT_ONCE = 2**22


def score_tokens(
    logits: Array, logits_rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Score `token_ids[i]` by row `logits_rows[i]` of `logits` [positions, vocab], with the `num_top[i]` best tokens.

    The best come first, of equal ones the lowest id; the rank is 1 plus the number of tokens that are more likely.
    """
    scored: list[TokenLogprobs] = []
    slab = max(1, _MAX_LOGITS_AT_ONCE // logits.shape[-1])
    for start in range(0, len(logits_rows), slab):
        part = slice(start, start + slab)
        rows = logits[list(logits_rows[part])]
        if is_on_host(rows):
            scored += _score_on_host(host_values(rows), token_ids[part], num_top[part])
        else:
            scored += _score_on_device(rows, token_ids[part], num_top[part])
    return scored


def _score_on_host(logits: np.ndarray, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    vocab_size = logits.shape[-1]
    scored = []
    with np.errstate(invalid="ignore", over="ignore"):  # a model's infinite logits are found elsewhere
        largest = logits.max(axis=-1)
        # The sum is in float64, so that its order does not matter.
        total = np.exp(logits - largest[:, None]).sum(axis=-1, dtype=np.float64)
        for row, token, wanted, most, log_total in zip(logits, token_ids, num_top, largest, np.log(total), strict=True):
            rank = int(np.count_nonzero(row > row[token])) + 1
            ids = _best(row, min(wanted, vocab_size)) if wanted > 0 else np.zeros(0, np.int64)
            logprobs = ((row[[token, *ids]] - most).astype(np.float64) - log_total).astype(np.float32).tolist()
            top = tuple(zip(ids.tolist(), logprobs[1:], strict=True))
            scored.append(TokenLogprobs(token, logprobs[0], rank, top))
    return scored


def _best(row: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the `count` best tokens of one row: the best first, of equal ones the lowest id."""
    if count < len(row):
        threshold = np.partition(row, len(row) - count)[len(row) - count]
        ids = np.flatnonzero(row >= threshold)
    else:
        ids = np.arange(len(row))
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


def _score_on_device(logits: Array, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=-1)
    ids = like(logits, np.array(token_ids, np.int64))[:, None]
    # The sum is in int32, as torch copies its input to the dtype of the sum.
    ranks = ((logits > logits.gather(1, ids)).sum(dim=-1, dtype=ids.int().dtype) + 1).tolist()
    chosen = logprobs.gather(1, ids).squeeze(1).tolist()
    vocab_size = logits.shape[-1]
    # One more than asked for shows whether the last place is shared.
    most = min(max(num_top) + 1, vocab_size) if max(num_top) > 0 else 0
    best = logits.topk(most, dim=-1)
    best_ids, best_logits = best.indices.tolist(), best.values.tolist()
    best_logprobs = logprobs.gather(1, best.indices).tolist()
    scored = []
    for i, (token, wanted) in enumerate(zip(token_ids, num_top, strict=True)):
        wanted = min(wanted, vocab_size)
        if 0 < wanted < vocab_size and best_logits[i][wanted - 1] == best_logits[i][wanted]:
            top = _top_with_ties(logits[i], logprobs[i], wanted, best_logits[i][wanted])
        else:
            order = sorted(range(wanted), key=lambda j: (-best_logits[i][j], best_ids[i][j]))
            top = [(best_ids[i][j], best_logprobs[i][j]) for j in order]
        scored.append(TokenLogprobs(token, chosen[i], ranks[i], tuple(top)))
    return scored


def _top_with_ties(logits: Array, logprobs: Array, wanted: int, threshold: float) -> list[tuple[int, float]]:
    """Return the best `wanted` tokens of one row if several tokens share the last place."""
    ids = (logits >= threshold).nonzero().squeeze(1)
    order = logits[ids].sort(descending=True, stable=True).indices[:wanted]
    ids = ids[order]
    return list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))


class LogitChunks(Protocol):
    """Logits of a step, which come in chunks: all sampled positions, then the scored ones in parts."""

    def next_chunk(self) -> Array:
        """Return the logits of the next positions, [positions, vocab] float32."""


class SampleKernel(Protocol):
    """Kernel `sample` (`ops/reference/sample.py`)."""

    def __call__(self, logits: Array, settings: Array = ..., keys: Array = ..., /) -> Array: ...


class _SampledPosition(NamedTuple):
    """One token of a row's output, if the drafts before it are right."""

    row_index: int
    pending: PendingToken


@dataclass(frozen=True, slots=True)
class _ScoredPosition:
    """One token of a prompt to be scored by the logits of the position before it."""

    row_index: int
    token_id: int
    num_top: int


class SampledTokens:
    """Sampled tokens of a step, with results that are known.

    `tokens` [rows] are on the model's device: the last of each row, or a negative number if it has none.
    """

    def __init__(self, tokens: Array, results: Sequence[RowResult] = ()) -> None:
        self.tokens, self._results = tokens, results

    def results(self) -> Sequence[RowResult]:
        """Return the results of the rows, which may wait for the device."""
        return self._results


class _TokensOnDevice(SampledTokens):
    """Sampled tokens, one per row, whose copy to the host may still be under way."""

    def __init__(self, tokens: Array, rows: Sequence[BatchRow]) -> None:
        """Start the copy to the host, and do not wait for it."""
        super().__init__(tokens)
        self._rows = rows
        import torch

        self._on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._on_host.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def results(self) -> Sequence[RowResult]:
        self._copied.synchronize()
        return _single_token_results(self._rows, self._on_host.tolist())


def sample_rows_async(
    logits: LogitChunks, rows: Sequence[BatchRow], *, kernel: SampleKernel, arrays: Arrays
) -> SampledTokens:
    """Sample a step without drafts, as `sample_rows` does, but read the results only when they are asked for.

    If each row needs just one token, as in most steps, nothing waits for the device before that.
    """
    if not all(row.num_logits == 1 and row.sampling_state.only_samples for row in rows):
        results = sample_rows(logits, rows, kernel=kernel)
        last = [result.token_ids[-1] if result.token_ids else -1 for result in results]
        return SampledTokens(arrays.of(last, "int32"), results)
    tokens = _sample_one_per_row(logits, rows, kernel)
    if arrays.is_on_host:
        return SampledTokens(tokens, _single_token_results(rows, tokens.tolist()))
    return _TokensOnDevice(tokens, rows)


def sample_rows(
    logits: LogitChunks, rows: Sequence[BatchRow], drafts: Sequence[tuple[int, ...]] = (), *, kernel: SampleKernel
) -> list[RowResult]:
    """Sample the next tokens of each row that `samples`, verify its drafts, and score what is asked for.

    `drafts[i]` are the tokens proposed for `rows[i]`, none for a row that does not sample; `()` for no drafts at all.
    The first chunk of `logits` has the positions that sample, rows in order: of each the last known token, then the
    drafts that it was really given, which may be fewer than its `num_drafts`. The next chunks have the positions that
    score prompts, at most PROMPT_POSITIONS each. The sampling state of every row with logits is a SamplingState.

    The last known token and the drafts sample the tokens at `row.end`, `row.end + 1`, ..., each with the noise of its
    position and with logits processed as if the output contained the drafts before it. A draft is accepted if it is the
    token sampled at its position and all drafts before it are accepted. A row's result is its accepted drafts and the
    token sampled after them: the tokens that one step each would have sampled, whatever the drafts. Log-probabilities
    are those of the model itself, before any processing.

    A row that has no finite best logit after its known tokens gets a ModelError, and nothing else, as its result, or a
    RequestError if its guide leaves no token; the other rows are not disturbed. If that happens after a draft, the
    row's tokens end there, and its next step reports the error.
    """
    if not any(drafts) and all(row.num_logits == 1 and row.sampling_state.only_samples for row in rows):
        return _single_token_results(rows, _sample_one_per_row(logits, rows, kernel).tolist())
    if drafts and all(row.num_logits == 1 + row.num_drafts and row.sampling_state.only_samples for row in rows):
        return _verify_drafts(logits, rows, drafts, kernel)
    drafts = drafts or [()] * len(rows)
    due: list[_SampledPosition] = []
    prompt_positions: list[_ScoredPosition] = []
    for index, row in enumerate(rows):
        if row.num_scored:
            prompt_positions += _known_tokens(index, row)
        if row.samples:
            due += [
                _SampledPosition(index, PendingToken(row.sampling_state, row.end + count, drafts[index][:count]))
                for count in range(1 + len(drafts[index]))
            ]
    tokens, logprobs = _sample_positions(logits, due, kernel)
    of_prompt = _score_prompts(logits, prompt_positions)
    return [
        RowResult(row.request_id, error=_no_token_error(row))
        if tokens.get(index) == ()
        else RowResult(
            row.request_id,
            tokens.get(index, ()),
            logprobs.get(index),
            tuple(of_prompt.get(index, ())),
            num_drafts=len(drafts[index]),
            grammar_ended=index in tokens and _ends(row.sampling_state, tokens[index]),
        )
        for index, row in enumerate(rows)
    ]


def select_tokens(logits: Array, pending_tokens: Sequence[PendingToken], kernel: SampleKernel) -> dict[int, int]:
    """Sample each of `pending_tokens` from its row of `logits` [pending tokens, vocab], which stay unchanged.

    Returns {index of the pending token: token id}. Logits are processed as the request asks, with the noise of its seed
    and position. The result depends on these and on the row's logits alone. So a proposer that samples a draft for the
    same position from its own logits shares the noise with the target, and often gets the same token. Pending tokens
    without a finite best logit are left out.
    """
    if not all(pending.state.needs_no_processing or pending.needs_no_processing for pending in pending_tokens):
        logits = copied(logits)
        process_logits(logits, pending_tokens)
    tokens = _sample_logits(
        logits, [pending.state for pending in pending_tokens], [pending.position for pending in pending_tokens], kernel
    )
    return {index: token for index, token in enumerate(tokens.tolist()) if token >= 0}


def _sample_logits(
    logits: Array, states: Sequence[SamplingState], positions: Sequence[int], kernel: SampleKernel
) -> Array:
    """Return the token of each row of `logits`, [rows] int32; -1 if no best logit is finite.

    The logits need no more processing before temperature.
    """
    if all(state.is_greedy for state in states):
        return kernel(logits)
    settings = np.array([state.draw_settings for state in states], dtype=np.float64)
    keys = noise_keys([(state.seed, position) for state, position in zip(states, positions, strict=True)])
    return kernel(logits, like_on_host(logits, settings), like_on_host(logits, keys))


def _sample_one_per_row(logits: LogitChunks, rows: Sequence[BatchRow], kernel: SampleKernel) -> Array:
    """Return the tokens of rows that need one each, and whose requests want nothing else, as in most steps."""
    states: list[SamplingState] = [row.sampling_state for row in rows]
    positions = [row.start + len(row.token_ids) for row in rows]
    return _sample_logits(logits.next_chunk(), states, positions, kernel)


def _single_token_results(rows: Sequence[BatchRow], tokens: Sequence[int]) -> list[RowResult]:
    """Return the results of rows with one token each."""
    return [
        RowResult(row.request_id, (token,))
        if token >= 0
        else RowResult(row.request_id, error=_not_finite_error(row.request_id))
        for row, token in zip(rows, tokens, strict=True)
    ]


def _verify_drafts(
    logits: LogitChunks, rows: Sequence[BatchRow], drafts: Sequence[tuple[int, ...]], kernel: SampleKernel
) -> list[RowResult]:
    """Sample rows with drafts whose requests want nothing else.

    A row's tokens are sampled after its known token and each draft, and kept as far as the drafts before them are
    right.
    """
    due = [(row, count) for row, ahead in zip(rows, drafts, strict=True) for count in range(1 + len(ahead))]
    states: list[SamplingState] = [row.sampling_state for row, _ in due]
    positions = [row.end + count for row, count in due]
    tokens = _sample_logits(logits.next_chunk(), states, positions, kernel).tolist()
    results = []
    place = 0
    for row, ahead in zip(rows, drafts, strict=True):
        drawn = tokens[place : place + 1 + len(ahead)]
        place += len(drawn)
        count = 1 + next((i for i, draft in enumerate(ahead) if draft != drawn[i]), len(ahead))
        if drawn[count - 1] < 0:
            count -= 1  # after a draft, the next step reports the error
        results.append(
            RowResult(row.request_id, tuple(drawn[:count]), num_drafts=len(ahead))
            if count
            else RowResult(row.request_id, error=_not_finite_error(row.request_id))
        )
    return results


def _sample_positions(
    logits: LogitChunks, due: Sequence[_SampledPosition], kernel: SampleKernel
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[TokenLogprobs, ...]]]:
    """Return the output tokens of each row, and their log-probabilities if asked for, by index of the row."""
    if not due:
        return {}, {}
    values = logits.next_chunk()
    chosen = select_tokens(values, [position.pending for position in due], kernel)
    tokens: dict[int, tuple[int, ...]] = {position.row_index: () for position in due}
    num_top: dict[int, int] = {}
    for i, (row_index, pending) in enumerate(due):
        # Other logits are of tokens that the row does not have.
        if i in chosen and tokens[row_index] == pending.drafts:
            tokens[row_index] += (chosen[i],)
            if pending.state.params.logprobs is not None:
                num_top[i] = pending.state.params.logprobs
    if not num_top:
        return tokens, {}
    scored = score_tokens(values, list(num_top), [chosen[i] for i in num_top], list(num_top.values()))
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    for i, token_logprobs in zip(num_top, scored, strict=True):
        logprobs[due[i].row_index] = (*logprobs.get(due[i].row_index, ()), token_logprobs)
    return tokens, logprobs


def _score_prompts(logits: LogitChunks, known: list[_ScoredPosition]) -> dict[int, list[TokenLogprobs]]:
    """Return the log-probabilities of known prompt tokens, by index of the row."""
    of_prompt: dict[int, list[TokenLogprobs]] = {}
    for start in range(0, len(known), PROMPT_POSITIONS):
        slab = known[start : start + PROMPT_POSITIONS]
        token_ids, num_top = [position.token_id for position in slab], [position.num_top for position in slab]
        scored = score_tokens(logits.next_chunk(), range(len(slab)), token_ids, num_top)
        for position, logprobs in zip(slab, scored, strict=True):
            of_prompt.setdefault(position.row_index, []).append(logprobs)
    return of_prompt


def _known_tokens(row_index: int, row: BatchRow) -> list[_ScoredPosition]:
    """Return the prompt tokens that the row's `num_scored` positions score: the ones after them."""
    state: SamplingState = row.sampling_state
    num_top = state.params.prompt_logprobs
    assert num_top is not None, "somebody wants to know them"
    first = row.end - row.num_logits + 1
    following = state.prompt_token_ids[first : first + row.num_scored]
    return [_ScoredPosition(row_index, token, num_top) for token in following]


def _ends(state: SamplingState, tokens: tuple[int, ...]) -> bool:
    """Return whether `tokens` complete the grammar of the request's guide."""
    return state.guidance is not None and state.guidance.ends_with(tokens)


def _no_token_error(row: BatchRow) -> RequestError | ModelError:
    """Return the reason why no token can follow the known ones."""
    reason = guide_error(PendingToken(row.sampling_state, row.end))
    return _not_finite_error(row.request_id) if reason is None else reason


def _not_finite_error(request_id: str) -> ModelError:
    return ModelError(
        f"the model gave logits that are not finite for request {request_id}; "
        "its numbers overflow in this dtype, or its weights are damaged",
        [Remedy("dtype", "float32")],
    )
