"""Acceptance: with any drafts, a request gets the tokens that one step each would have sampled."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ModelError
from ostinato.sampling import sampler
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.batch import BatchRow, RowResult
from tests.support.draws import draw
from tests.support.logit_table import LogitTable
from tests.support.toy_requests import EOS, VOCAB, Model, Request, random_model, step, successor

pytestmark = pytest.mark.usefixtures("every_draw")


def plain(model: Model, prompt: Sequence[int], params: SamplingParams, length: int, seed: int = 7) -> Request:
    """The definition: one token a step, alone in the batch."""
    request = Request(prompt, params, seed)
    while len(request.output) < length:
        step(model, [request])
    return request


# The same tokens as without drafts

LENGTH = 9
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.8]),
    top_k=st.sampled_from([0, 0, 2, 9]),
    top_p=st.sampled_from([1.0, 1.0, 0.6, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.15]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.6]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7, 1.5]),
    logit_bias=st.sampled_from([{}, {}, {3: 4.0, 1: 3.0}]),
    min_tokens=st.sampled_from([0, 0, 3, 6]),
    stop_token_ids=st.sampled_from([(), (5,), tuple(range(5, 20))]),
    seed=st.integers(1, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 2]),
)


@settings(deadline=None, max_examples=120)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    num_drafts=st.integers(1, 4),
    model_seed=st.integers(0, 2**32),
    tie_step=st.sampled_from([0.0, 1.0]),
    rng=st.randoms(use_true_random=False),
)
@pytest.mark.slow
def test_partly_right_drafts_give_the_tokens_and_logprobs_of_one_step_each(
    params: list[SamplingParams], num_drafts: int, model_seed: int, tie_step: float, rng: random.Random
) -> None:
    model = random_model(model_seed, step=tie_step)
    prompts = [tuple(rng.choices(range(VOCAB), k=rng.randint(1, 5))) for _ in params]
    expected = [plain(model, *each, LENGTH + num_drafts + 1) for each in zip(prompts, params, strict=True)]
    requests = [Request(*each) for each in zip(prompts, params, strict=True)]
    running = list(zip(requests, expected, strict=True))
    while running:
        coming = [right.output[len(request.output) :] for request, right in running]
        drafts = [
            tuple(t if rng.random() < 0.75 else rng.randrange(VOCAB) for t in tokens[: rng.randint(0, num_drafts)])
            for tokens in coming
        ]
        results = step(model, [request for request, _ in running], drafts, num_drafts)
        num_right = [matching(*each) for each in zip(drafts, coming, strict=True)]
        assert [len(result.token_ids) for result in results] == [1 + num for num in num_right]
        assert [result.num_drafts for result in results] == [len(of_row) for of_row in drafts]
        running = [(request, right) for request, right in running if len(request.output) < LENGTH]
    for request, right in zip(requests, expected, strict=True):
        assert request.output == right.output[: len(request.output)]
        assert request.logprobs == right.logprobs[: len(request.output)]


def matching(drafts: Sequence[int], coming: Sequence[int]) -> int:
    """How many drafts are right before the first that is wrong."""
    return next(
        (i for i, (draft, token) in enumerate(zip(drafts, coming, strict=False)) if draft != token), len(drafts)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_drafts_change_penalties_within_the_step_and_never_after_it(penalty: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **{penalty: 1.9})
    model = random_model(3)
    expected = plain(model, (4, 4, 2), params, 12)
    request = Request((4, 4, 2), params)
    for length in range(12):
        token = expected.output[length]
        # Wrong ones alone: what they would count as must be gone when the next step counts.
        step(model, [request], [((token + 1) % VOCAB, token, token)], num_drafts=3)
        assert request.output == expected.output[: length + 1]
    right = Request((4, 4, 2), params)
    while len(right.output) < 12:
        step(model, [right], [tuple(expected.output[len(right.output) :][:3])], num_drafts=3)
    assert right.output == expected.output


def test_end_tokens_are_held_back_until_the_drafts_before_them_make_up_min_tokens() -> None:
    def likes_to_end(prefix: tuple[int, ...]) -> torch.Tensor:
        return successor(prefix) + torch.eye(VOCAB)[EOS[0]] * 200

    request = Request((5,), SamplingParams(temperature=0, min_tokens=2))
    [result] = step(likes_to_end, [request], [(6, 7, 1)], num_drafts=3)
    assert result.token_ids == (6, 7, 1, 1)
    request = Request((5,), SamplingParams(temperature=0, min_tokens=2))
    [result] = step(likes_to_end, [request], [(6, 1, 1)], num_drafts=3)
    assert result.token_ids == (6, 7)


# What is accepted


@pytest.mark.parametrize(
    ("drafts", "gained"),
    [
        ((), (6,)),
        ((9,), (6,)),
        ((6,), (6, 7)),
        ((6, 7, 8), (6, 7, 8, 9)),
        ((6, 9, 8), (6, 7)),
        ((9, 7, 8), (6,)),
        ((9, 10, 11), (6,)),
        ((6, 7, 9), (6, 7, 8)),
        ((6, 6), (6, 7)),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_drafts_are_kept_up_to_the_first_wrong_one_and_one_token_is_sampled_behind_them(
    drafts: tuple[int, ...], gained: tuple[int, ...], temperature: float
) -> None:
    request = Request((5,), SamplingParams(temperature=temperature))
    [result] = step(successor, [request], [drafts], num_drafts=3)
    assert result == RowResult("r", gained, num_drafts=len(drafts))


def test_a_wrong_draft_and_what_is_sampled_behind_it_never_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, leak = 20, 23

    def model(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.eye(VOCAB)[leak] * 50 if wrong in prefix else successor(prefix)

    scored: list[int] = []

    def score(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]) -> Any:
        scored.extend(tokens)
        return original(logits, rows, tokens, num_top)

    original = sampler.score_tokens
    monkeypatch.setattr(sampler, "score_tokens", score)
    requests = [Request((5,), SamplingParams(temperature=t, logprobs=1)) for t in (0.0, 0.8, 0.0)]
    drafts = [(6, wrong, leak, leak), (wrong, leak, leak, leak), (6, 7, wrong, leak)]
    results = step(model, requests, drafts, num_drafts=4)
    assert [result.token_ids for result in results] == [(6, 7), (6,), (6, 7, 8)]
    assert [[each.token_id for each in request.logprobs] for request in requests] == [[6, 7], [6], [6, 7, 8]]
    assert scored == [6, 7, 6, 6, 7, 8]


def test_places_exist_for_the_drafts_that_were_given_and_no_others() -> None:
    """Beside rows that do not decode, and a row whose drafts fall short of its room."""
    asks = SamplingParams(temperature=0, prompt_logprobs=0)
    chunk, last, single = (Request(range(2, 12), asks, name=name) for name in ("chunk", "last", "single"))
    full, short = (Request((5,), SamplingParams(temperature=0), name=name) for name in ("full", "short"))
    whole = BatchRow(
        "last", tuple(range(5, 12)), 3, (1,), num_logits=7, samples=True, sampling_state=last.state, num_scored=6
    )
    part = BatchRow("chunk", (2, 3, 4), 0, (1,), num_logits=3, sampling_state=chunk.state, num_scored=3)
    quiet = BatchRow("quiet", (2, 3), 0, (1,), sampling_state=full.state)
    rows = [full.row(3), short.row(3), single.row(2), quiet, part, whole]
    drafts = [(6, 7, 8), (6,), (12, 13), (), (), ()]
    prefixes = [(5,), (5, 6), (5, 6, 7), (5, 6, 7, 8), (5,), (5, 6)]
    prefixes += [single.prompt, (*single.prompt, 12), (*single.prompt, 12, 13)]
    prefixes += [chunk.prompt[:n] for n in (1, 2, 3)] + [last.prompt[:n] for n in range(4, 11)]
    logits = torch.stack([successor(prefix) for prefix in prefixes])
    results = sampler.sample_rows(LogitTable(logits, rows, drafts), rows, drafts, kernel=draw)
    expected = [(6, 7, 8, 9), (6, 7), (12, 13, 14), (), (), (12,)]
    assert [result.token_ids for result in results] == expected
    assert [result.num_drafts for result in results] == [3, 1, 2, 0, 0, 0]
    assert [[each.token_id for each in result.prompt_logprobs] for result in results[2:]] == [
        [],
        [],
        [3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]
    assert all(each.rank == 1 for result in results for each in result.prompt_logprobs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("temperature", "logprobs"), [(0.0, 0), (0.0, None), (0.3, 0)])
def test_logits_that_are_not_finite_end_the_accepted_tokens_and_are_an_error_when_they_come_first(
    temperature: float, logprobs: int | None, bad: float
) -> None:
    def breaks(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.full((VOCAB,), bad) if prefix[-1] == 7 else successor(prefix)

    params = SamplingParams(temperature=temperature, logprobs=logprobs)
    broken, sound = Request((5,), params, name="broken"), Request((10,), params, name="sound")
    results = step(breaks, [broken, sound], [(6, 7, 8), (11, 12, 13)], num_drafts=3)
    assert [result.token_ids for result in results] == [(6, 7), (11, 12, 13, 14)]
    assert len(broken.logprobs) == (0 if logprobs is None else 2)
    results = step(breaks, [broken, sound], [(8, 9), (15,)], num_drafts=3)
    assert isinstance(results[0].error, ModelError)
    assert results[0] == RowResult("broken", error=results[0].error)
    assert results[1].token_ids == (15, 16)


def test_acceptance_counted_by_hand_is_what_the_results_say() -> None:
    request = Request((5,), SamplingParams(temperature=0))
    # Drafts, and how many of them are right.
    by_hand = [((6, 7, 0), 2), ((9, 9, 9), 1), ((10, 11, 12), 0), ((), 0), ((14,), 0), ((14, 15, 16), 3)]
    counted = []
    for drafts, _ in by_hand:
        [result] = step(successor, [request], [drafts], num_drafts=3)
        counted.append((len(result.token_ids) - 1, result.num_drafts))
    assert counted == [(num_right, len(drafts)) for drafts, num_right in by_hand]
    assert request.output == list(range(6, 18))
