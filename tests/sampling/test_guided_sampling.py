"""Sampling within a guide: what is drawn follows it, whatever the drafts, and nothing else of sampling changes."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ModelError, RequestError
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.request import FinishReason, StopConditions
from ostinato.scheduler.request import Request as Scheduled
from tests.support.guides import EOS, toy_grammar, toy_text
from tests.support.toy_requests import VOCAB, Model, Request, random_model, step

pytestmark = pytest.mark.usefixtures("every_draw")

GUIDES = [
    Guide(regex="(ab|bc|c){1,4}-[0-2]{1,3}"),
    Guide(choice=["abc", "ab", "abcabc", "12-12"]),
    Guide(json_schema={"type": "array", "items": {"enum": ["a", "ab", 12, 1]}, "maxItems": 4}),
    Guide(json_schema={"type": "integer", "minimum": 0, "maximum": 212}),
    Guide(regex="[a-d]{0,7}"),
]
PARAMS = st.builds(
    SamplingParams,
    guide=st.sampled_from(GUIDES),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 0, 2]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.15]),
    repetition_penalty=st.sampled_from([1.0, 1.6]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.sampled_from([{}, {3: 50.0, EOS: 20.0}, {23: 100.0, 0: 100.0}]),
    seed=st.integers(1, 2**64 - 1),
    logprobs=st.sampled_from([None, 2]),
)


class Guided:
    """A request as the scheduler would end it."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, name: str = "r") -> None:
        assert params.guide is not None
        self.request = Request(prompt, params, name=name, grammar=toy_grammar(params.guide))
        stop = StopConditions(60, params.min_tokens, eos_token_ids=frozenset([EOS]))
        self.scheduled = Scheduled(name, prompt, stop, output_token_ids=self.request.output, max_num_tokens=60)
        self.reason: FinishReason | None = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.reason is not None or self.error is not None

    @property
    def text(self) -> str:
        return "".join(map(toy_text, self.request.output))


def advance(
    model: Model, guided: Sequence[Guided], drafts: Sequence[tuple[int, ...]] = (), num_drafts: int = 0
) -> None:
    """One step; its tokens go through `accept`."""
    before = [list(each.request.output) for each in guided]
    results = step(model, [each.request for each in guided], drafts, num_drafts)
    for each, old, result in zip(guided, before, results, strict=True):
        each.error = result.error
        each.request.output[:] = old
        num_kept, each.reason = each.scheduled.append_outputs(result.token_ids, result.grammar_ended)
        num_dropped = len(result.token_ids) - num_kept
        if num_dropped and each.request.logprobs:
            del each.request.logprobs[-num_dropped:]


def alone(model: Model, prompt: Sequence[int], params: SamplingParams) -> Guided:
    """The definition: one token a step."""
    guided = Guided(prompt, params)
    while not guided.done:
        advance(model, [guided])
    return guided


@settings(deadline=None, max_examples=100)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    num_drafts=st.integers(1, 4),
    model_seed=st.integers(0, 2**32),
    rng=st.randoms(use_true_random=False),
)
def test_partly_right_drafts_give_the_tokens_and_endings_of_one_step_each(
    params: list[SamplingParams], num_drafts: int, model_seed: int, rng: random.Random
) -> None:
    model = random_model(model_seed)
    prompts = [tuple(rng.choices(range(VOCAB), k=rng.randint(1, 5))) for _ in params]
    expected = [alone(model, *each) for each in zip(prompts, params, strict=True)]
    guided = [Guided(*each) for each in zip(prompts, params, strict=True)]
    while running := [(own, right) for own, right in zip(guided, expected, strict=True) if not own.done]:
        coming = [right.request.output[len(own.request.output) :] for own, right in running]
        drafts = [
            tuple(t if rng.random() < 0.75 else rng.randrange(VOCAB) for t in (*tokens, EOS, EOS)[: rng.randint(0, 4)])
            for tokens in coming
        ]
        advance(model, [own for own, _ in running], [of_row[:num_drafts] for of_row in drafts], num_drafts)
    for own, right in zip(guided, expected, strict=True):
        assert own.error is None
        assert (own.request.output, own.reason) == (right.request.output, right.reason)
        assert own.request.logprobs == right.request.logprobs
        assert own.reason is FinishReason.STOP
        # A walk of its own over the tokens finds a whole output at their end, and nowhere before.
        assert_whole(own)


def assert_whole(guided: Guided) -> None:
    text, guide = guided.text, guided.request.state.params.guide
    assert guide is not None
    if guide.choice:
        assert text in guide.choice
    elif guide.regex is not None:
        assert re.fullmatch(guide.regex, text)
    else:
        assert guide.json_schema is not None
        jsonschema_rs.validate(json.loads(guide.json_schema), json.loads(text))


def likes(token: int) -> Model:
    return lambda prefix: torch.eye(VOCAB)[token] * 30


def test_an_output_that_is_complete_ends_without_an_end_token() -> None:
    guided = alone(likes(2), (5,), SamplingParams(guide={"regex": "a{3}"}, temperature=0))
    assert (guided.request.output, guided.reason) == ([2, 2, 2], FinishReason.STOP)
    assert guided.scheduled.stop_reason is None


def test_an_output_that_may_end_ends_with_an_end_token() -> None:
    guided = alone(likes(EOS), (5,), SamplingParams(guide={"regex": "a*"}, temperature=0))
    assert (guided.request.output, guided.scheduled.stop_reason) == ([EOS], EOS)


def test_min_tokens_holds_end_tokens_back_where_the_guide_can_go_on() -> None:
    guided = alone(likes(EOS), (5,), SamplingParams(guide={"regex": "a*"}, temperature=0, min_tokens=3))
    assert len(guided.request.output) == 4
    assert guided.text == "aaa"


@pytest.mark.parametrize("regex", ["a{2}", "a{2}d?|a"])
@pytest.mark.parametrize("drafts", [(), (2, 2), (2, EOS)])
def test_min_tokens_that_a_guide_cannot_reach_are_an_error_of_that_request_alone(
    regex: str, drafts: tuple[int, ...]
) -> None:
    params = SamplingParams(guide={"regex": regex}, temperature=0, min_tokens=4)
    short, other = Guided((5,), params), Guided((5,), SamplingParams(guide={"regex": "a{9}"}, temperature=0))
    while not short.done:
        advance(likes(2), [short, other], [drafts, ()], 2)
    assert isinstance(short.error, RequestError)
    assert short.request.output[:2] == [2, 2]
    [remedy] = short.error.remedies
    assert (remedy.setting, remedy.value) == ("min_tokens", len(short.request.output))
    assert other.error is None
    assert set(other.request.output) == {2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error_of_that_request_alone(bad: float) -> None:
    def model(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.full((VOCAB,), bad) if prefix[0] == 9 else torch.zeros(VOCAB)

    params = SamplingParams(guide={"regex": "a{9}"}, temperature=0.5)
    broken, sound = Guided((9,), params), Guided((5,), params)
    advance(model, [broken, sound])
    assert isinstance(broken.error, ModelError)
    assert sound.error is None
    assert len(sound.request.output) == 1


def test_log_probabilities_are_the_models_own() -> None:
    params = SamplingParams(guide={"regex": "b"}, temperature=0, logprobs=1)
    guided = alone(likes(2), (5,), params)
    [scored] = guided.request.logprobs
    expected = (torch.eye(VOCAB)[2] * 30).log_softmax(0)
    assert scored.token_id == 3
    assert scored.logprob == pytest.approx(expected[3].item())
    assert scored.top[0][0] == 2


def test_top_k_chooses_among_what_the_guide_allows() -> None:
    params = SamplingParams(guide={"choice": ["d", "-"]}, top_k=1, top_p=0.1, seed=3)
    assert alone(likes(2), (5,), params).text in ("d", "-")


def test_plain_and_guided_requests_share_a_step() -> None:
    guided = Guided((5,), SamplingParams(guide={"regex": "b{1,5}"}, temperature=0))
    plain = Request((5,), SamplingParams(temperature=0))
    step(likes(2), [plain, guided.request, plain], [(), (3,), ()], 1)
    assert guided.request.output == [3, 3] or guided.request.output == [3, EOS]
    assert plain.output == [2, 2]
