"""Choosing the next token of each row, and the log-probabilities that its request asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ostinato.errors import ModelError, Remedy
from ostinato.sample import noise
from ostinato.sample.logprobs import score
from ostinato.sample.processing import adjust, restrict
from ostinato.sample.state import SamplingState
from ostinato.schedule.batch import Row, RowResult, TokenLogprobs

# A token so far below the best one cannot win, whatever their noise; 1 is room for rounding.
_HOPELESS = noise.GUMBEL_MIN - noise.GUMBEL_MAX - 1
# Noise for whole rows is made for so many tokens at a time, to stay in a core's cache.
_NOISE_SLAB = 2**17


# So many prompt positions have logits at a time: a prompt's logits at once could outweigh all that was planned.
_PROMPT_SLAB = 64

Project = Callable[[list[int]], torch.Tensor]
"""Places among the batch's positions with logits -> their logits [places, vocab] float32."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """One token to be chosen, for a row of the batch; its logits stand at `place`."""

    place: int
    row: Row
    state: SamplingState


@dataclass(frozen=True, slots=True)
class _Known:
    """One token of a prompt to be scored by the logits at `place`, those of the position before it."""

    row_index: int
    place: int
    token_id: int
    num_top: int


def sample(project: Project, rows: Sequence[Row]) -> list[RowResult]:
    """Sample the next token of each row that `samples`, and score what is asked for.

    Places count the positions with logits: each row's `num_logits` trailing ones, rows in order. The payload of
    every row with logits is its SamplingState. Log-probabilities are those of the model itself, before any
    processing. A sampled token stands at position `row.end`, which selects its noise. A row that samples and has
    no finite best logit gets a ModelError, and nothing else, as its result; the others are not disturbed.
    """
    picks: dict[int, _Pick] = {}
    prompt_positions: list[_Known] = []
    first = 0
    for index, row in enumerate(rows):
        if row.num_logits:
            prompt_positions += _known_tokens(index, row, first)
            if row.samples:
                picks[index] = _Pick(first + row.num_logits - 1, row, row.payload)
        first += row.num_logits
    tokens, logprobs = _sample_picks(project, picks)
    of_prompt = _score_prompts(project, prompt_positions)
    return [
        RowResult(row.request_id, error=_not_finite(row.request_id))
        if index in picks and index not in tokens
        else RowResult(
            request_id=row.request_id,
            token_ids=(tokens[index],) if index in tokens else (),
            logprobs=(logprobs[index],) if index in logprobs else None,
            prompt_logprobs=tuple(of_prompt.get(index, ())),
        )
        for index, row in enumerate(rows)
    ]


def _sample_picks(project: Project, picks: dict[int, _Pick]) -> tuple[dict[int, int], dict[int, TokenLogprobs]]:
    """The token of each pick, and its log-probabilities where they are asked for, by index of the row.

    Picks whose logits are not finite are left out.
    """
    if not picks:
        return {}, {}
    indices, ordered = list(picks), list(picks.values())
    logits = project([pick.place for pick in ordered])
    tokens = _choose(logits, ordered)
    num_top = {i: top for i in tokens if (top := ordered[i].state.params.logprobs) is not None}
    scored = score(logits, list(num_top), [tokens[i] for i in num_top], list(num_top.values()))
    logprobs = {indices[i]: each for i, each in zip(num_top, scored, strict=True)}
    return {indices[i]: token for i, token in tokens.items()}, logprobs


def _score_prompts(project: Project, known: list[_Known]) -> dict[int, list[TokenLogprobs]]:
    """The log-probabilities of known prompt tokens, by index of the row."""
    of_prompt: dict[int, list[TokenLogprobs]] = {}
    for start in range(0, len(known), _PROMPT_SLAB):
        slab = known[start : start + _PROMPT_SLAB]
        logits = project([each.place for each in slab])
        scored = score(logits, range(len(slab)), [each.token_id for each in slab], [each.num_top for each in slab])
        for each, logprobs in zip(slab, scored, strict=True):
            of_prompt.setdefault(each.row_index, []).append(logprobs)
    return of_prompt


def _known_tokens(row_index: int, row: Row, first: int) -> list[_Known]:
    """The prompt tokens that follow the row's positions with logits; `first` is the place of the first of these."""
    state: SamplingState = row.payload
    num_top = state.params.prompt_logprobs
    if num_top is None:
        return []
    next_position = row.end - row.num_logits + 1
    following = state.prompt_token_ids[next_position : row.end + 1]
    return [_Known(row_index, first + i, token, num_top) for i, token in enumerate(following)]


def _choose(logits: torch.Tensor, picks: Sequence[_Pick]) -> dict[int, int]:
    """Place of a pick in `picks`, and in `logits` [picks, vocab], left unchanged -> its token.

    Picks without a finite best logit are left out.
    """
    chosen: dict[int, int] = {}
    for greedy in (True, False):
        places = [i for i, pick in enumerate(picks) if pick.state.params.greedy == greedy]
        if not places:
            continue
        group = [picks[i] for i in places]
        values = _take(logits, places)
        if not all(pick.state.plain for pick in group):
            values = values.clone() if values is logits else values
            adjust(values, [pick.state for pick in group])
        if not greedy:
            values = restrict(values, [pick.state.params for pick in group])
            _add_noise(values, group)
        # The first, so lowest, id wins a tie.
        best, tokens = values.max(dim=-1)
        for place, token, is_finite in zip(places, tokens.tolist(), best.isfinite().tolist(), strict=True):
            if is_finite:
                chosen[place] = token
    return chosen


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows of the logits: `logits` itself if they are all of it."""
    if len(rows) == len(logits):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _add_noise(values: torch.Tensor, picks: Sequence[_Pick]) -> None:
    """Add each row's Gumbel noise, in place, where it can matter; the best value of each row is 0."""
    row_keys = noise.keys([(pick.state.seed, pick.row.end) for pick in picks], values.device)
    vocab_size = values.shape[-1]
    flat = values.view(-1)
    hopeful = (flat >= _HOPELESS).nonzero().squeeze(1)
    if 4 * len(hopeful) < values.numel():
        row = hopeful // vocab_size
        token_ids = (hopeful - row * vocab_size).int()
        flat[hopeful] += noise.gumbel(row_keys[row], token_ids)
        return
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=values.device)
    slab = max(1, _NOISE_SLAB // vocab_size)
    for start in range(0, len(picks), slab):
        values[start : start + slab] += noise.gumbel(row_keys[start : start + slab, None], token_ids)


def _not_finite(request_id: str) -> ModelError:
    return ModelError(
        f"the model gave logits that are not finite for request {request_id}; "
        "its numbers overflow in this dtype, or its weights are damaged",
        [Remedy("dtype", "float32")],
    )
