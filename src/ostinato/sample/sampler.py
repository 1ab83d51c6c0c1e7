"""Choosing the next token of each row, and the log-probabilities that its request asked for."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class _Pick:
    """One token to be chosen: from which row of the logits, for which row of the batch."""

    logits_row: int
    row: Row
    state: SamplingState


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[RowResult]:
    """Sample the next token of each row that `samples`, and score what is asked for.

    `logits` is [sum of num_logits, vocab] float32: each row's trailing positions, rows in order; it is not
    changed. The payload of every row with logits is its SamplingState. Log-probabilities are those of the
    model itself, before any processing. A sampled token stands at position `row.end`, which selects its
    noise. Raises ModelError if a row has no finite best logit.
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
    tokens = dict(zip(picks, _choose(logits, list(picks.values())), strict=True))
    wanted = [index for index, pick in picks.items() if pick.state.params.logprobs is not None]
    scored = score(
        logits,
        [picks[i].logits_row for i in wanted] + [known.logits_row for known in prompt_positions],
        [tokens[i] for i in wanted] + [known.token_id for known in prompt_positions],
        [picks[i].state.params.logprobs or 0 for i in wanted] + [known.num_top for known in prompt_positions],
    )
    of_token = dict(zip(wanted, scored, strict=False))
    of_prompt: dict[int, list[TokenLogprobs]] = {}
    for known, logprobs in zip(prompt_positions, scored[len(wanted) :], strict=True):
        of_prompt.setdefault(known.row_index, []).append(logprobs)
    return [
        RowResult(
            request_id=row.request_id,
            token_ids=(tokens[index],) if index in tokens else (),
            logprobs=(of_token[index],) if index in of_token else None,
            prompt_logprobs=tuple(of_prompt.get(index, ())),
        )
        for index, row in enumerate(rows)
    ]


@dataclass(frozen=True, slots=True)
class _Known:
    """One token of a prompt to be scored by the logits of the position before it."""

    row_index: int
    logits_row: int
    token_id: int
    num_top: int


def _known_tokens(row_index: int, row: Row, first: int) -> list[_Known]:
    """The prompt tokens that follow the row's positions with logits; `first` is their first row of logits."""
    state: SamplingState = row.payload
    num_top = state.params.prompt_logprobs
    if num_top is None:
        return []
    next_position = row.end - row.num_logits + 1
    following = state.prompt_token_ids[next_position : row.end + 1]
    return [_Known(row_index, first + i, token, num_top) for i, token in enumerate(following)]


def _choose(logits: torch.Tensor, picks: Sequence[_Pick]) -> list[int]:
    """The token of each pick, in their order."""
    chosen = [0] * len(picks)
    for greedy in (True, False):
        places = [i for i, pick in enumerate(picks) if pick.state.params.greedy == greedy]
        if not places:
            continue
        group = [picks[i] for i in places]
        values = _take(logits, [pick.logits_row for pick in group])
        if not all(pick.state.plain for pick in group):
            values = values.clone() if values is logits else values
            adjust(values, [pick.state for pick in group])
        if not greedy:
            values = restrict(values, [pick.state.params for pick in group])
            _add_noise(values, group)
        # The first, so lowest, id wins a tie.
        best, tokens = values.max(dim=-1)
        _check_finite(best, group)
        for place, token in zip(places, tokens.tolist(), strict=True):
            chosen[place] = token
    return chosen


def _take(logits: torch.Tensor, logits_rows: list[int]) -> torch.Tensor:
    """Those rows of the logits: `logits` itself if they are all of it."""
    if logits_rows == list(range(len(logits))):
        return logits
    return logits[torch.tensor(logits_rows, device=logits.device)]


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


def _check_finite(best: torch.Tensor, picks: Sequence[_Pick]) -> None:
    bad = (~best.isfinite()).nonzero().squeeze(1).tolist()
    if bad:
        names = ", ".join(picks[i].row.request_id for i in bad)
        raise ModelError(
            f"the model gave logits that are not finite for request {names}; "
            "its numbers overflow in this dtype, or its weights are damaged",
            [Remedy("dtype", "float32")],
        )
